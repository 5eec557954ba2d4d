"""The command `dbt-llm`."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from dbt_llm.errors import DbtLLMError
from dbt_llm.version import __version__


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="dbt-llm", description="Look at what dbt models with LLM calls do."
    )
    parser.add_argument("--version", action="version", version=f"dbt-llm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="what a run would ask and cost; nothing is asked",
        description="Print what dbt run would ask, for each model and call. All other options go "
        "to dbt: --select, --exclude, --vars, --target, --project-dir and so on.",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    doctor = commands.add_parser(
        "doctor",
        help="whether all that a run needs is there, and what to do where it is not",
        description="Check the project, the store, the LLMs and Ray. All other options go to dbt: "
        "--target, --profiles-dir, --project-dir and so on.",
    )
    doctor.add_argument("--no-ray", action="store_true", help="do not start Ray to look at it")
    init = commands.add_parser(
        "init",
        help="set a dbt project up: the dispatch block, the package, and a profile to paste",
        description="Insert what dbt-llm needs into dbt_project.yml and packages.yml; nothing else "
        "of them changes. Print a profile to paste into profiles.yml.",
    )
    init.add_argument("--project-dir", type=Path, default=Path(), help="default: this folder")
    init.add_argument("--dry-run", action="store_true", help="only say what would be done")
    options, of_dbt = parser.parse_known_args(arguments)
    try:
        if options.command == "init":
            if of_dbt:
                parser.error(f"unknown options: {' '.join(of_dbt)}")
            return _init(options.project_dir, options.dry_run)
        if options.command == "doctor":
            return _doctor(of_dbt, with_ray=not options.no_ray)
        return _plan(of_dbt, options.json)
    except DbtLLMError as error:
        print(f"dbt-llm: {error}", file=sys.stderr)
        return 1


def _plan(arguments: list[str], as_json: bool) -> int:
    from dbt_llm.dbt_project import compiled_models, connected, dbt_variable
    from dbt_llm.plan import describe, plan_models

    models = compiled_models(arguments)
    limit = dbt_variable("llm_limit")
    with connected() as (session, cursor), tempfile.TemporaryDirectory() as folder:
        if limit is None:
            limit = session.config.limit
        plans = plan_models(session, cursor, models, Path(folder), limit)
    if as_json:
        print(json.dumps([plan.as_dict() for plan in plans], indent=2))
    elif plans:
        print(describe(plans))
    else:
        print("None of the selected models calls an LLM.")
    return 0


def _init(project: Path, dry_run: bool) -> int:
    from dbt_llm.project_setup import set_up, write

    own = Path(__file__).parent
    # The wheel has the macros in a folder of its own; a checkout has them beside this one.
    package = own / "include" if (own / "include").is_dir() else own.parent
    changes, profile = set_up(project, package)
    if not dry_run:
        write(changes)
    for change in changes:
        print(f"{change.path}: {change.words}")
    print(f"\nNext: run dbt deps, and put this into profiles.yml:\n\n{profile}")
    print(
        "Then `dbt-llm doctor` says whether all is there, and `dbt-llm plan` what a run would ask."
    )
    return 0


def _doctor(arguments: list[str], with_ray: bool) -> int:
    from dbt_llm.dbt_project import parsed_project
    from dbt_llm.doctor import examine

    config, project, target = parsed_project(arguments)
    good = True
    for finding in examine(config, project, target, with_ray):
        print(finding.line(), flush=True)
        good = good and finding.good
    print("All is well." if good else "Something has to be done first.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
