"""`casckpt tag`, `untag`, `annotate`, `retire`: small entries in the timeline, beside a training that goes on.

These are the only commands that change a store. In a store with several runs they ask for `--run`, since a step means
something in each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from casckpt.cli._screen import (
    chosen_run,
    json_option,
    looking,
    open_named,
    print_json,
    ref_argument,
    run_option,
    say,
    snapshot_json,
    store_argument,
)
from casckpt.cli._text import pairs
from casckpt.errors import InvalidInputError

if TYPE_CHECKING:
    from casckpt.format.entry import MetricValue
    from casckpt.store.store import Store
    from casckpt.store.values import Snapshot

write_run_option = click.option("--run", metavar="R", help="Name of the run. [default: the only one]")


@contextlib.contextmanager
def _writing(path: str, run: str | None) -> Iterator[Store]:
    """A store opened for writing in a run that is there."""
    if run is None:
        with looking(path) as (_, inspection):
            names = [each.name for each in inspection.runs()]
        if len(names) > 1:
            raise click.UsageError(f"this store has several runs ({', '.join(names)}): name one with --run.")
        run = names[0] if names else "main"
    else:
        with looking(path) as (_, inspection):
            inspection.check_run(run)
    with open_named(path, run=run) as store:
        yield store


@click.command()
@store_argument
@click.argument("name", required=False)
@ref_argument()
@run_option
@json_option
def tag(path: str, name: str | None, ref: str, run: str | None, as_json: bool) -> None:
    """Give a snapshot a name of its own, which every later command takes as a REF. Without NAME, list the names."""
    if name is None:
        _list_tags(path, run, as_json)
        return
    with _writing(path, run) as store:
        snapshot = store.tag(name, ref)
    _report("tag", path, snapshot, f"tagged {name}: {snapshot}", {"tag": name}, as_json)


def _list_tags(path: str, run: str | None, as_json: bool) -> None:
    with looking(path) as (store, inspection):
        run = chosen_run(inspection, run)
        tags = next((each.tags for each in inspection.runs() if each.name == run), {})
        if as_json:
            print_json("tag", {"store": store.path, "run": run, "tags": tags})
            return
    for name, snapshot_id in tags.items():
        say(f"{name}  {snapshot_id[:12]}")
    if not tags:
        say(f"run {run} has no tags")


@click.command()
@store_argument
@click.argument("name")
@write_run_option
@json_option
def untag(path: str, name: str, run: str | None, as_json: bool) -> None:
    """Take a name away. The snapshot stays."""
    with _writing(path, run) as store:
        store.untag(name)
        run = store.run
    if as_json:
        print_json("untag", {"store": path, "run": run, "tag": name})
    else:
        say(f"tag {name} of run {run} is gone")


@click.command()
@store_argument
@ref_argument(is_required=True)
@click.option("-m", "--metric", "metrics", multiple=True, metavar="NAME=VALUE", help="Number or text; repeatable.")
@click.option("-l", "--label", "labels", multiple=True, metavar="NAME=TEXT", help="Text; repeatable.")
@write_run_option
@json_option
def annotate(
    path: str, ref: str, metrics: tuple[str, ...], labels: tuple[str, ...], run: str | None, as_json: bool
) -> None:
    """Add metrics and labels to a snapshot, such as an evaluation that ended later. Later values of a name win."""
    if not metrics and not labels:
        raise click.UsageError("nothing to add: give --metric NAME=VALUE or --label NAME=TEXT.")
    found_metrics = {name: _number(value) for name, value in map(_split, metrics)}
    found_labels = dict(map(_split, labels))
    with _writing(path, run) as store:
        snapshot = store.annotate(ref, metrics=found_metrics, labels=found_labels)
    _report("annotate", path, snapshot, f"{snapshot}: {pairs({**snapshot.metrics, **snapshot.labels})}", {}, as_json)


@click.command()
@store_argument
@ref_argument(is_required=True)
@write_run_option
@json_option
def retire(path: str, ref: str, run: str | None, as_json: bool) -> None:
    """Hide a snapshot from listings and from "latest". Deletes nothing: its id still restores."""
    with _writing(path, run) as store:
        snapshot = store.retire(ref)
    text = f"retired {snapshot}; `casckpt log --retired` lists it"
    _report("retire", path, snapshot, text, {}, as_json)


def _report(command: str, path: str, snapshot: Snapshot, text: str, more: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(command, {"store": path, **more, "snapshot": snapshot_json(snapshot)})
    else:
        say(text)


def _split(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not name or not equals:
        raise InvalidInputError(f"{pair!r}: expected NAME=VALUE", value=pair)
    return name, value


def _number(text: str) -> MetricValue:
    """An int or float where the text reads like one, else the text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
