"""`casckpt plan`: what a recovery of a run would do, and why. Exit code 1 when it would not go on."""

from __future__ import annotations

import click

from casckpt.cli import _exits
from casckpt.cli._screen import finish, json_option, open_named, print_json, run_option, say, store_argument


@click.command()
@store_argument
@run_option
@click.option("--failure", default="unknown", metavar="KIND", help="How it ended: exception, nan, oom-kill, …")
@click.option("--failed-step", type=int, metavar="N", help="The last step that the training told of.")
@click.option("--metric", metavar="NAME", help="What the best snapshot is measured by.")
@click.option("--smallest", is_flag=True, help="The smallest value of the metric is the best.")
@click.option("--logged-step", type=int, metavar="N", help="The last step that the training's log has.")
@click.option("--world-size", type=int, metavar="N", help="How many processes are to go on.")
@click.option("--allow-fresh", is_flag=True, help="Plan a fresh start where no snapshot can be resumed.")
@json_option
def plan(
    path: str,
    run: str | None,
    failure: str,
    failed_step: int | None,
    metric: str | None,
    smallest: bool,
    logged_step: int | None,
    world_size: int | None,
    allow_fresh: bool,
    as_json: bool,
) -> None:
    """Say what a recovery would do after a failure: from which snapshot, in which steps, and what stands in the way.

    Nothing is changed. Exit code 0: it can go on, 1: a person must decide.
    """
    from casckpt.recovery.decision import FailureInfo, Policy
    from casckpt.recovery.plan import make_plan
    from casckpt.store.inspection import Inspection

    if run is None:
        with open_named(path, read_only=True) as store:
            run = Inspection(store).last_run()
    with open_named(path, read_only=True, run=run or "main") as store:
        found = make_plan(
            store,
            failure=FailureInfo(failure, failed_step),
            policy=Policy(metric=metric, largest=not smallest),
            logged_step=logged_step,
            world_size=world_size,
            allow_fresh=allow_fresh,
        )
        if as_json:
            print_json("plan", {"store": store.path, "run": run, "plan": found.to_dict()})
        else:
            say(str(found))
    finish(_exits.FINE if found.is_possible else _exits.NO)
