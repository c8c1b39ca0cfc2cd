"""Loading what a user names as `path/to/file.py:name`, with errors that say what was expected."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_from_file(text: str) -> Any:
    """The object `name` of the Python file in `path/to/file.py:name`. ValueError if there is no such file or name, or
    if the file cannot be imported."""
    path_text, _, name = text.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise ValueError(f"{text!r}: expected an existing Python file before the colon, got {path_text!r}")
    module_name = f"{path.stem}_{hashlib.sha1(str(path.resolve()).encode()).hexdigest()[:8]}"
    if module_name not in sys.modules:
        specification = importlib.util.spec_from_file_location(module_name, path)
        if specification is None or specification.loader is None:
            raise ValueError(f"{text!r}: {path} is not a Python file")
        module = importlib.util.module_from_spec(specification)
        sys.modules[module_name] = module
        try:
            specification.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            raise ValueError(f"{text!r}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(sys.modules[module_name], name):
        raise ValueError(f"{text!r}: {path} has no {name!r}")
    return getattr(sys.modules[module_name], name)
