"""(S42) A process that is stopped while it holds the index's write lock: others never wait for it for ever.

Beyond its commit point a commit stands whatever the index does; before it, `BusyError` names the holder.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import casckpt
from casckpt.errors import BusyError, StoreWarning
from casckpt.testing.invariants import index_counts
from tests.concurrency.racers import racing

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this platform cannot stop a process")

HOLD = """
store = casckpt.open(path)
with store._keeper.kv.write() as txn:
    gate()
store.close()
say(closed=True)
"""


def test_commit_stands_although_a_stopped_process_holds_the_index(store_path: Path) -> None:
    with casckpt.open(str(store_path), create=True, lock_timeout_s=0.2) as store:
        store.commit(1, {"counters": {"step": 1}})
        with racing([HOLD], str(store_path)) as (holder,):
            os.kill(holder.pid, signal.SIGSTOP)
            with pytest.warns(StoreWarning, match=str(holder.pid)):
                snapshot = store.commit(2, {"counters": {"step": 2}})
            assert (store_path / "timeline" / f"{0:014d}" / f"{snapshot.seq:020d}").exists()
            os.kill(holder.pid, signal.SIGCONT)
            holder.release()
            assert holder.hear() == {"closed": True}
        assert store.steps() == [1, 2], "the index caught up"
        assert store.restore(2) == {"counters": {"step": 2}}
        assert store.verify(read_data=True).ok
        counts = index_counts(store)
    with casckpt.open(str(store_path)) as store:
        assert index_counts(store) == counts


def test_busy_before_the_commit_point_names_the_holder_and_changes_nothing(store_path: Path) -> None:
    with (
        casckpt.open(str(store_path), create=True, lock_timeout_s=0.2) as store,
        casckpt.open(str(store_path), run="other") as other,
    ):
        store.commit(1, {"counters": {"step": 1}})
        with racing([HOLD], str(store_path)) as (holder,):
            os.kill(holder.pid, signal.SIGSTOP)
            with pytest.warns(StoreWarning):
                store.commit(2, {"counters": {"step": 2}})  # stands; what follows must catch up first
            with pytest.raises(BusyError, match=str(holder.pid)):
                store.commit(3, {"counters": {"step": 3}})
            os.kill(holder.pid, signal.SIGCONT)
            holder.release()
            assert holder.hear() == {"closed": True}
        assert store.steps() == [1, 2]
        store.commit(3, {"counters": {"step": 3}})
        other.commit(1, {"counters": {"step": 1}})
        assert store.steps() == [1, 2, 3]
        assert store.verify(read_data=True).ok


def test_a_reader_that_does_not_write_opens_beside_a_stopped_holder(store_path: Path) -> None:
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, {"counters": {"step": 1}})
    with racing([HOLD], str(store_path)) as (holder,):
        os.kill(holder.pid, signal.SIGSTOP)
        with casckpt.open(str(store_path), read_only=True) as store:
            assert store.restore(1) == {"counters": {"step": 1}}
        os.kill(holder.pid, signal.SIGCONT)
        holder.release()
        assert holder.hear() == {"closed": True}
