"""The commands of `meshmark`, by what people come for; harness/cli.py puts them together."""
