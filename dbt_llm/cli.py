"""The command `dbt-llm`: its arguments, and how it ends."""

import argparse
import gc
import os
import sys
from pathlib import Path

from dbt_llm import commands
from dbt_llm.errors import DbtLLMError
from dbt_llm.version import __version__

_PIPE_CLOSED = 141


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except DbtLLMError as error:
        print(f"dbt-llm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(commands.INTERRUPTED, file=sys.stderr)
        return commands.INTERRUPTED_CODE
    except BrokenPipeError:
        # Python would try to write the rest when it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    finally:
        _end_thread_pools()


def _end_thread_pools() -> None:
    """End the pool of threads that dbt leaves to the garbage collector after an error.

    That may close the pool's pipe before the pool, which then fails and prints a traceback.
    """
    pools = sys.modules.get("multiprocessing.pool")
    if pools is None:
        return
    for left in gc.get_objects():
        if issubclass(type(left), pools.ThreadPool):
            left.terminate()


def _run(arguments: list[str] | None) -> int:
    parser = new_parser()
    options, of_dbt = parser.parse_known_args(arguments)
    match options.command:
        case "init":
            if of_dbt:
                parser.error(f"init does not know {' '.join(of_dbt)}")
            return commands.init(options.project_dir, options.dry_run)
        case "doctor":
            return commands.doctor(of_dbt, with_ray=not options.no_ray)
        case "plan":
            return commands.plan(of_dbt, options.json)
        case "store":
            return _store(parser, options, of_dbt)
        case _:
            return commands.report(of_dbt, options.runs, options.json)


def _store(parser: argparse.ArgumentParser, options: argparse.Namespace, of_dbt: list[str]) -> int:
    if options.action != "vacuum" and (options.dry_run or options.retention_hours is not None):
        parser.error(f"store {options.action} takes no --dry-run and no --retention-hours")
    match options.action:
        case "stats":
            return commands.store_stats(of_dbt, options.json)
        case "compact":
            return commands.store_compact(of_dbt, options.json)
        case _:
            return commands.store_vacuum(
                of_dbt, options.retention_hours, options.dry_run, options.json
            )


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, in the order in which people need them."""
    parser = argparse.ArgumentParser(
        prog="dbt-llm",
        description="Set up, check, plan and review dbt models that call LLMs. "
        "None of these commands asks an LLM.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dbt-llm {__version__}")
    all_of_them = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, words: str, description: str) -> argparse.ArgumentParser:
        return all_of_them.add_parser(name, help=words, description=description, allow_abbrev=False)

    init = command(
        "init",
        "set a dbt project up: the dispatch block, the package, a profile to paste",
        "Insert what dbt-llm needs into dbt_project.yml and packages.yml; nothing else of them "
        "changes. Print a profile to paste into profiles.yml.",
    )
    init.add_argument(
        "--project-dir", type=Path, default=Path(), metavar="FOLDER", help="default: this folder"
    )
    init.add_argument("--dry-run", action="store_true", help="only say what would be done")

    doctor = command(
        "doctor",
        "whether all that a run needs is there, and what to do where it is not",
        "Look at the project, the profile, the store, each LLM and Ray. The exit code is 1 where "
        "something has to be done. All other options go to dbt parse: --target, --profiles-dir, "
        "--project-dir and so on.",
    )
    doctor.add_argument(
        "--no-ray", action="store_true", help="do not start or join Ray, which takes some seconds"
    )

    plan = command(
        "plan",
        "what a run would ask and cost",
        "Print what dbt run would ask, for each model and call. All other options go to dbt "
        "compile: --select, --exclude, --vars, --target, --project-dir and so on.",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")

    report = command(
        "report",
        "what past runs asked and cost",
        "Print the last runs of dbt and all models, from the run log and the store. All other "
        "options go to dbt parse: --target, --profiles-dir, --project-dir and so on.",
    )
    report.add_argument(
        "--runs", type=_count, default=10, metavar="N", help="how many runs are listed; default: 10"
    )
    report.add_argument("--json", action="store_true", help="print JSON")

    store = command(
        "store",
        "what the store holds; merge its small files, remove replaced ones",
        "stats: print what the store holds. compact: merge its small files, which changes no "
        "answer. vacuum: remove files that were replaced long ago. All other options go to dbt "
        "parse: --target, --profiles-dir, --project-dir and so on.",
    )
    store.add_argument("action", choices=["stats", "compact", "vacuum"])
    store.add_argument(
        "--retention-hours",
        type=_hours,
        metavar="N",
        help="vacuum: how long ago a file must have been replaced; default: 168, which is a week",
    )
    store.add_argument(
        "--dry-run", action="store_true", help="vacuum: only say what would be removed"
    )
    store.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs; give 1 or more")
    return int(text)


def _hours(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of hours; give 0 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
