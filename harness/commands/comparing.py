"""The command that compares: the strategies of a run on a page, or two builds in turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.commands.arguments import bad_input


def compare(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RESULTS... | REV_A REV_B]",
            help="Results directories, or the results.jsonl in them; or two revisions of this git repository.",
            show_default=False,
        ),
    ] = None,
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="PAGE.md", help="Where to write the page. Default: standard output.")
    ] = None,
    readme: Annotated[
        Path | None,
        typer.Option(
            metavar="README.md",
            help="A file in which to make the table of strategies and libraries anew, between `<!-- figures: SUITE; "
            "from PAGE -->` and `<!-- end of figures -->`.",
        ),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(metavar="S", help="The suite whose cases are timed on both revisions or versions.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME==VERSION", help="Twice: two versions of a library under this very code."),
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="PATTERN", help="As for `meshmark run`.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where to train.")] = "cpu",
    format: Annotated[
        Literal["table", "markdown", "json"], typer.Option("--format", help="How to print what came of two builds.")
    ] = "table",
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where every time is kept. Default: results/compare-SUITE-TIME.", show_default=False
        ),
    ] = None,
    no_upload: Annotated[bool, typer.Option("--no-upload", help="Leave MLflow alone.")] = False,
) -> None:
    """Compare the strategies of a run on a page, or what links cost; or time two revisions, or two versions of a peer.

    [bold]meshmark compare results/sharding-20300101-120000 --out sharding.md[/]   a page: memory, bytes, time, lines

    [bold]meshmark compare results/tensor results/zero --out all.md[/]             one page of several runs

    [bold]meshmark compare results/peers --out dashboards/peers.md --readme README.md[/]   README's table, too

    [bold]meshmark compare main my-branch --suite nightly[/]                       exit code 1 where my-branch is slower

    [bold]meshmark compare --peer deepspeed==0.19.7 --peer deepspeed==0.19.8 --suite peers[/]
    """
    from harness.result import RESULTS_FILE

    named, peers = what or [], peer or []
    measured = [name for name in named if Path(name).is_file() or (Path(name) / RESULTS_FILE).is_file()]
    is_page = not peers and bool(named) and (len(named) == 1 or bool(measured))
    with bad_input():
        if not is_page and (len(named), len(peers)) not in ((2, 0), (0, 2)):
            raise ValueError(
                "compare: expected results directories, or two revisions, or --peer twice, got "
                f"{len(named)} names and {len(peers)} peers"
            )
        in_turns = {"--suite": suite, "--only": only, "--results": results}
        given = [option for option, value in in_turns.items() if value is not None]
        if is_page and given:
            raise ValueError(f"compare {' '.join(named)}: {given[0]} is for two revisions, got results")
        if not is_page and suite is None:
            raise ValueError("compare: expected --suite S, whose cases are timed on both, got none")
        if not is_page and (out or readme) is not None:
            option = "--out" if out is not None else "--readme"
            raise ValueError(f"compare: {option} is for the page of results directories; see --results and --format")
    if is_page:
        _page([Path(name) for name in named], out, readme)
        return
    assert suite is not None
    raise typer.Exit(
        _in_turns(named, peers, suite, only=only, device=device, format=format, results=results, upload=not no_upload)
    )


def _page(results: list[Path], out: Path | None, readme: Path | None) -> None:
    from harness import comparison, comparison_page, readme_figures, textbook, topology_page

    with bad_input():
        found = comparison.read_runs(results)
        if topology_page.spans_topologies(found):
            page = topology_page.page(found, *results)
        else:
            page = comparison_page.page(textbook.filled_in(found), *results)
        text = None
        if readme is not None:
            try:
                text = readme_figures.with_figures(readme.read_text(encoding="utf-8"), found)
            except ValueError as error:
                raise ValueError(f"--readme {readme}: {error}") from error
        # First what README points to: a page that cannot be written leaves README as it was.
        if out is not None:
            out.write_text(page, encoding="utf-8")
        if readme is not None and text is not None:
            readme.write_text(text, encoding="utf-8")
    print(page if out is None else f"{out}: {len(found)} cases", end="" if out is None else "\n")


def _in_turns(
    revisions: list[str],
    peers: list[str],
    suite: str,
    *,
    only: str | None,
    device: Literal["cpu", "cuda"],
    format: str,
    results: Path | None,
    upload: bool,
) -> int:
    import sys

    from harness import suite_run, suites, validation
    from harness.paired import builds, paired_report, paired_run

    with bad_input(), paired_run.telling() as tell:
        loaded = suites.load(suite)
        chosen = loaded if only is None else suites.select(loaded, only)
        validation.check_device(device)
        family = builds.pinned(peers[0])[0] if peers else None
        cases = paired_run.timed_cases(chosen, only_family=family)
        directory = results or paired_run.directory_named(chosen.name)
        if (directory / paired_report.PAIRS_FILE).exists():
            raise ValueError(f"--results {directory}: holds a comparison; name another directory")
        opened = (
            builds.of_peers((peers[0], peers[1]), tell)
            if peers
            else builds.of_revisions((revisions[0], revisions[1]), Path.cwd(), tell)
        )
        compared = paired_run.run(chosen.name, cases, opened, device=device, tell=tell)
        kept = paired_report.write(compared, directory)
    if format == "json":
        print(json.dumps(paired_report.to_json(compared), indent=1, allow_nan=False))
    elif format == "markdown":
        print(paired_report.markdown(compared), end="")
    else:
        suite_run.console_here().print(paired_report.text(compared))
    aside = sys.stdout if format == "table" else sys.stderr
    print(f"every time: {kept}", file=aside)
    if upload:
        print(paired_run.record(compared, kept), file=aside)
    return 1 if compared.is_red else 0
