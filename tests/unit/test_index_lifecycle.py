"""An index is used only when nothing speaks against it, and whatever lies in its place, `open` answers."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from casckpt.errors import OutOfSpaceError, ReadOnlyError, StorageError
from casckpt.ids import StoreId
from casckpt.index import lifecycle
from casckpt.index.kv import Kv
from casckpt.index.lifecycle import IndexHome
from casckpt.index.place import _mount_kind, index_root

TABLES = ("objects", "meta")
STORE = StoreId(bytes(range(16)))
ENTRIES = [(b"%05d" % n, b"value %d" % n) for n in range(2000)]


def home_of(store: Path, **options: object) -> IndexHome:
    options.setdefault("boot_id", lambda: "this boot")
    return IndexHome(str(store), STORE, TABLES, **options)  # type: ignore[arg-type]


def fill(kv: Kv) -> None:
    with kv.write() as txn:
        txn.put_many("objects", ENTRIES)


def build(store: Path, **options: object) -> Path:
    """A healthy, closed index; returns the folder of its generation."""
    home = home_of(store, **options)
    kv = home.rebuild(fill)
    assert kv is not None, home.reason
    kv.close()
    return Path(kv.folder)


def entries_of(kv: Kv) -> list[tuple[bytes, bytes]]:
    with kv.read() as txn:
        return list(txn.scan("objects"))


OPENER = """
import os, sys
from casckpt.ids import StoreId
from casckpt.index.lifecycle import IndexHome
for line in sys.stdin:
    if os.fork() == 0:
        store_path, store_id = line.rstrip("\\n"), StoreId(bytes(range(16)))
        home = IndexHome(store_path, store_id, ("objects", "meta"), boot_id=lambda: "this boot")
        kv = home.open()
        if kv is None:
            print(home.reason, flush=True)
        else:
            with kv.read() as txn:
                count = sum(1 for _ in txn.scan("objects"))
            kv.close()
            print("healthy", count, flush=True)
        os._exit(0)
    status = os.wait()[1]
    if status:
        print("died of", status, flush=True)
"""


@pytest.fixture(scope="module")
def opened_in_child() -> Iterator[Callable[[Path], str]]:
    """Open and read everything in a process of its own, where a crash would show; returns what it says."""
    with subprocess.Popen(
        [sys.executable, "-c", OPENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as opener:
        assert opener.stdin is not None
        assert opener.stdout is not None

        def ask(store: Path) -> str:
            opener.stdin.write(f"{store}\n")
            return opener.stdout.readline().strip()

        yield ask


Opened = Callable[[Path], str]


def test_nothing_there_is_missing_and_a_built_one_opens_with_its_entries(tmp_path: Path) -> None:
    home = home_of(tmp_path)
    assert home.open() is None
    assert home.reason == "missing"
    build(tmp_path)
    kv = home.open()
    assert kv is not None
    assert (home.reason, home.generation) == (None, 1)
    assert entries_of(kv) == ENTRIES
    kv.close()


def test_opening_creates_nothing_where_nothing_is(tmp_path: Path) -> None:
    home_of(tmp_path).open()
    home_of(tmp_path, read_only=True).open()
    assert list(tmp_path.iterdir()) == []


def test_a_closed_index_is_sealed_and_leaves_no_mark(tmp_path: Path) -> None:
    folder = build(tmp_path)
    assert (folder / "data.mdb").stat().st_mtime == 1_000_000_000
    assert sorted(path.name for path in folder.iterdir()) == ["data.mdb", "lock.mdb", "write.lock"]


def test_writes_after_reopening_survive_closing(tmp_path: Path) -> None:
    build(tmp_path)
    for n in range(3):
        kv = home_of(tmp_path).open()
        assert kv is not None
        with kv.write() as txn:
            assert txn.count("meta") == n
            txn.put("meta", b"%d" % n, b"")
        kv.close()


def test_an_unclosed_kv_is_sealed_when_the_interpreter_ends(tmp_path: Path, opened_in_child: Opened) -> None:
    build(tmp_path)
    script = (
        "import sys; from casckpt.index.lifecycle import IndexHome; from casckpt.ids import StoreId\n"
        "home = IndexHome(sys.argv[1], StoreId(bytes(range(16))), ('objects', 'meta'), boot_id=lambda: 'this boot')\n"
        "kv = home.open()\n"
        "with kv.write() as txn: txn.put('meta', b'k', b'v')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=180)
    assert opened_in_child(tmp_path) == "healthy 2000"
    assert (tmp_path / "index/1/data.mdb").stat().st_mtime == 1_000_000_000


# --- identity ---


def test_another_boot_is_not_trusted(tmp_path: Path) -> None:
    build(tmp_path)
    for boot in ("next boot", ""):
        home = home_of(tmp_path, boot_id=lambda boot=boot: boot)
        assert home.open() is None
        assert home.reason is not None
        assert home.reason.startswith("after reboot")


def test_a_system_without_boot_ids_trusts_nothing_across_opens(tmp_path: Path) -> None:
    build(tmp_path, boot_id=lambda: "")
    home = home_of(tmp_path, boot_id=lambda: "")
    assert home.open() is None


def test_the_real_boot_id_is_the_same_in_two_processes() -> None:
    script = "from casckpt.index.lifecycle import read_boot_id; print(read_boot_id())"
    answers = [subprocess.check_output([sys.executable, "-c", script], text=True) for _ in range(2)]
    assert answers[0] == answers[1] != "\n"


def test_another_stores_index_is_foreign(tmp_path: Path) -> None:
    build(tmp_path / "a")
    home = IndexHome(str(tmp_path / "a"), StoreId(b"x" * 16), TABLES, boot_id=lambda: "this boot")
    assert home.open() is None
    assert home.reason is not None
    assert home.reason.startswith("foreign store")


@pytest.mark.parametrize("copy", [shutil.copytree, lambda a, b: subprocess.run(["cp", "-a", a, b], check=True)])
def test_a_copied_store_does_not_use_the_copied_index(tmp_path: Path, copy: Callable) -> None:
    build(tmp_path / "a")
    copy(tmp_path / "a", tmp_path / "b")
    home = home_of(tmp_path / "b")
    assert home.open() is None
    assert home.reason == "copied folder"


def test_a_moved_store_keeps_its_index(tmp_path: Path) -> None:
    build(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    kv = home_of(tmp_path / "b").open()
    assert kv is not None
    assert entries_of(kv) == ENTRIES
    kv.close()


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
def test_a_file_replaced_by_its_own_copy_is_noticed(tmp_path: Path, name: str) -> None:
    folder = build(tmp_path)
    shutil.copy2(folder / name, folder / "copy")
    (folder / "copy").replace(folder / name)
    home = home_of(tmp_path)
    assert home.open() is None
    assert home.reason == f"damaged: {name} was replaced"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("format", 99, "other format: 99"),
        ("complete", False, "incomplete"),
        ("generation", 7, "damaged: generation 7 is missing"),
        ("store", "00", "foreign store"),
        ("boot", "other", "after reboot"),
        ("folder", [1, 2], "copied folder"),
        ("data", [1, 2], "damaged: data.mdb was replaced"),
        ("lock", [1, 2], "damaged: lock.mdb was replaced"),
        ("data", "text", "damaged: pointer"),
        ("extra", 1, "damaged: pointer"),
        ("token", "00", "damaged: data.mdb is another index's"),
    ],
)
def test_every_field_of_the_pointer_is_checked(tmp_path: Path, field: str, value: object, reason: str) -> None:
    build(tmp_path)
    pointer = tmp_path / "index/current"
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), field: value}))
    home = home_of(tmp_path)
    assert home.open() is None
    assert home.reason is not None
    assert home.reason.startswith(reason)


# --- damage ---


def random_bytes(path: Path) -> None:
    path.write_bytes(random.Random(7).randbytes(max(path.stat().st_size, 64)))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def one_page_short(path: Path) -> None:
    os.truncate(path, max(path.stat().st_size - 4096, 0))


def one_byte_longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def flipped_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def gone(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def a_folder(path: Path) -> None:
    gone(path)
    path.mkdir()


def a_dangling_link(path: Path) -> None:
    gone(path)
    path.symlink_to(path.parent / "nowhere")


def a_link_to_itself_moved(path: Path) -> None:
    target = path.parent / f"moved-{path.name}"
    path.rename(target)
    path.symlink_to(target)


def a_fifo(path: Path) -> None:
    gone(path)
    os.mkfifo(path)


def another_stores(path: Path) -> None:
    store = next(parent for parent in path.parents if parent.name == "store")
    other = store.parent / "other"
    build(other)
    source = other / path.relative_to(store)
    gone(path)
    shutil.copytree(source, path) if source.is_dir() else shutil.copy2(source, path)


FILE_DAMAGE = [random_bytes, zeros, empty, half, one_page_short, one_byte_longer, flipped_middle]
ANY_DAMAGE = [gone, a_folder, a_dangling_link, a_link_to_itself_moved, a_fifo, another_stores]
FILES = ["index/current", "index/1/data.mdb", "index/1/lock.mdb", "index/1/write.lock", "index/build.lock"]


def is_harmless(name: str, damage: Callable) -> bool | None:
    """LMDB writes lock.mdb anew for its first user; the text of the other locks is a note. None: the inode decides."""
    is_in_place = damage in FILE_DAMAGE
    return {
        "index/1/lock.mdb": None if damage is another_stores else is_in_place,
        "index/1/write.lock": is_in_place or damage in (gone, another_stores),
        "index/build.lock": True,
    }.get(name, False)


def damage_cases() -> list:
    cases = [(name, how) for name in FILES for how in FILE_DAMAGE + ANY_DAMAGE]
    cases += [(name, how) for name in ("index", "index/1") for how in ANY_DAMAGE]
    return [pytest.param(name, how, id=f"{name.replace('/', '_')}-{how.__name__}") for name, how in cases]


@pytest.mark.few(25)
@pytest.mark.parametrize(("name", "damage"), damage_cases())
def test_whatever_lies_in_its_place_open_answers_and_a_rebuild_works(
    tmp_path: Path, opened_in_child: Opened, name: str, damage: Callable[[Path], None]
) -> None:
    store = tmp_path / "store"
    build(store)
    damage(store / name)
    answer = opened_in_child(store)
    assert answer
    assert not answer.startswith("died")
    if is_harmless(name, damage) is not None:
        assert (answer == "healthy 2000") == is_harmless(name, damage), answer
    home = home_of(store)
    kv = home.open() or home.rebuild(fill)
    assert kv is not None, home.reason
    assert entries_of(kv) == ENTRIES
    kv.close()
    assert opened_in_child(store) == "healthy 2000"


def overwrite_unnoticed(folder: Path, offset: int, content: bytes) -> None:
    """Damage in place as a dying disk does it: no modification time tells of it."""
    times = (folder / "data.mdb").stat()
    with (folder / "data.mdb").open("r+b") as file:
        file.seek(offset)
        file.write(content)
    os.utime(folder / "data.mdb", ns=(times.st_atime_ns, times.st_mtime_ns))


def leave_mark_of_dead_user(folder: Path) -> None:
    script = (
        "import sys, os; from casckpt.index.presence import FolderPresence; FolderPresence(sys.argv[1]); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=False, timeout=180)
    assert len(list(folder.glob("use-*"))) == 1


def test_after_a_user_died_a_healthy_index_is_probed_and_used(tmp_path: Path) -> None:
    folder = build(tmp_path)
    leave_mark_of_dead_user(folder)
    kv = home_of(tmp_path).open()
    assert kv is not None
    assert len(list(folder.glob("use-*"))) == 1  # its own now
    kv.close()
    assert list(folder.glob("use-*")) == []


@pytest.mark.parametrize("page", ["leaf", "root"])
def test_after_a_user_died_damage_inside_is_found_by_the_probe(
    tmp_path: Path, opened_in_child: Opened, page: str
) -> None:
    folder = build(tmp_path)
    size = (folder / "data.mdb").stat().st_size
    pages = range(2, size // 4096) if page == "root" else [size // 4096 // 2]
    for number in pages:
        overwrite_unnoticed(folder, number * 4096, random.Random(number).randbytes(4096))
    leave_mark_of_dead_user(folder)
    assert opened_in_child(tmp_path).startswith("damaged: the probe ended with")


def test_a_file_cut_below_what_its_meta_pages_claim_is_never_mapped_here(
    tmp_path: Path, opened_in_child: Opened
) -> None:
    folder = build(tmp_path)
    times = (folder / "data.mdb").stat()
    os.truncate(folder / "data.mdb", 3 * 4096)
    os.utime(folder / "data.mdb", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert opened_in_child(tmp_path).startswith("damaged: the probe ended with")


def test_a_probe_that_hangs_is_ended_and_means_no(tmp_path: Path) -> None:
    folder = build(tmp_path)
    leave_mark_of_dead_user(folder)
    home = home_of(tmp_path, probe_timeout_s=0.0)
    assert home.open() is None
    assert home.reason == "damaged: the probe took longer than 0 s"


# --- building ---


def test_a_build_that_was_not_completed_is_never_published_and_leaves_nothing(tmp_path: Path) -> None:
    home = home_of(tmp_path)
    with home.new_generation() as building:
        fill(building.kv)
    assert home.open() is None
    assert home.reason == "missing"
    with pytest.raises(ZeroDivisionError), home.new_generation() as building:
        fill(building.kv)
        building.complete()
        raise ZeroDivisionError
    assert home.open() is None
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["build.lock"]


def test_a_failed_rebuild_keeps_the_index_before_it(tmp_path: Path) -> None:
    build(tmp_path)
    home = home_of(tmp_path)
    with pytest.raises(ZeroDivisionError), home.new_generation():
        raise ZeroDivisionError
    kv = home.open()
    assert kv is not None
    assert (home.generation, entries_of(kv)) == (1, ENTRIES)
    kv.close()


def test_a_builder_killed_half_way_is_not_taken_for_whole_and_its_leftovers_go(tmp_path: Path) -> None:
    build(tmp_path)
    script = (
        "import sys, os; from casckpt.index.lifecycle import IndexHome; from casckpt.ids import StoreId\n"
        "home = IndexHome(sys.argv[1], StoreId(bytes(range(16))), ('objects', 'meta'), boot_id=lambda: 'this boot')\n"
        "with home.new_generation() as building:\n"
        "    with building.kv.write() as txn: txn.put('objects', b'half', b'')\n"
        "    building.complete(); os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=180)
    assert (tmp_path / "index/2/data.mdb").exists()
    home = home_of(tmp_path)
    kv = home.open()
    assert kv is not None
    assert (home.generation, entries_of(kv)) == (1, ENTRIES)
    kv.close()
    with home.new_generation() as building:
        building.complete()
    building.kv.close()
    assert home.generation == 3
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == ["3", "build.lock", "current"]


def test_others_go_on_reading_the_old_generation_which_goes_when_they_are_done(tmp_path: Path) -> None:
    build(tmp_path)
    old = home_of(tmp_path).open()
    assert old is not None
    with old.read() as before:
        with home_of(tmp_path).new_generation() as building:
            building.complete()
        building.kv.close()
        assert [key for key, _ in before.scan("objects")] == [key for key, _ in ENTRIES]
    with old.write() as txn:
        txn.put("meta", b"still", b"writable")
    old.close()
    assert (tmp_path / "index/1").exists()
    with home_of(tmp_path).new_generation() as building:
        building.complete()
    building.kv.close()
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == ["3", "build.lock", "current"]


def test_rebuild_takes_what_another_published_meanwhile(tmp_path: Path) -> None:
    late = home_of(tmp_path)
    assert late.open() is None
    build(tmp_path)
    kv = late.rebuild(lambda kv: pytest.fail("built again"))
    assert kv is not None
    assert late.generation == 1
    kv.close()
    again = late.rebuild(fill)  # but the one it has seen and does not want is replaced
    assert again is not None
    assert late.generation == 2
    again.close()


def test_removing_leaves_what_the_index_did_not_make(tmp_path: Path) -> None:
    folder = build(tmp_path)
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "index" / "notes.txt").write_text("mine")
    home = home_of(tmp_path)
    with home.new_generation() as building:
        building.complete()
    building.kv.close()
    assert (folder / "notes.txt").read_text() == (tmp_path / "index/notes.txt").read_text() == "mine"


def test_an_interrupted_pointer_write_leaves_the_old_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path)
    before = (tmp_path / "index/current").read_bytes()

    def refuse(*paths: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(lifecycle.os, "replace", refuse)
        home = home_of(tmp_path)
        assert home.open() is not None
        assert home.rebuild(fill) is None
    assert home.reason is not None
    assert "I/O error" in home.reason
    assert (tmp_path / "index/current").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == ["1", "build.lock", "current"]


# --- where nothing can be written ---


def test_read_only_opens_a_healthy_index_creates_nothing_and_refuses_to_build(tmp_path: Path) -> None:
    folder = build(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "lock.mdb"}
    home = home_of(tmp_path, read_only=True)
    kv = home.open()
    assert kv is not None
    assert entries_of(kv) == ENTRIES
    with pytest.raises(ReadOnlyError), kv.write():
        pass
    kv.close()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "lock.mdb"} == before
    with pytest.raises(ReadOnlyError):
        home.rebuild(fill)
    leave_mark_of_dead_user(folder)
    assert home.open() is None
    assert home.reason == "suspect: its last user died"


def test_a_folder_that_cannot_be_written_is_a_reason_not_an_exception(tmp_path: Path) -> None:
    build(tmp_path / "store")
    script = (
        "import os, sys; from casckpt.index.lifecycle import IndexHome; from casckpt.ids import StoreId\n"
        "os.chdir(sys.argv[1])\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "boot = lambda: 'this boot'\n"
        "for read_only in (False, True):\n"
        "    home = IndexHome('store', StoreId(bytes(range(16))), ('a',), boot_id=boot, read_only=read_only)\n"
        "    print(home.open(), home.reason)\n"
        "home = IndexHome('store', StoreId(bytes(range(16))), ('a',), boot_id=boot)\n"
        "print(home.rebuild(lambda kv: None), home.reason)\n"
    )
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222 | 0o444)
    for path in tmp_path.parents:
        if path.stat().st_uid == os.getuid() and not path.stat().st_mode & stat.S_IXOTH and str(path) != "/":
            path.chmod(path.stat().st_mode | stat.S_IXOTH)
    tmp_path.chmod(0o755)
    answer = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=180, check=False
    )
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        path.chmod(0o755)
    assert answer.stderr == ""
    lines = answer.stdout.splitlines()
    assert lines[0].startswith("None unusable:")
    assert lines[1] == "None no permission to register as a reader"
    assert lines[2].startswith("None unusable:")


def test_a_full_disk_while_filling_is_a_reason_and_the_old_index_stays(tmp_path: Path) -> None:
    build(tmp_path)
    home = home_of(tmp_path)
    kv = home.open()
    assert kv is not None

    def out_of_room(kv: Kv) -> None:
        fill(kv)
        raise OutOfSpaceError("index: full", errno=errno.ENOSPC, index_path="there")

    assert home.rebuild(out_of_room) is None
    assert home.reason is not None
    assert home.reason.startswith("unusable")
    assert entries_of(kv) == ENTRIES
    kv.close()


def test_errors_of_the_store_itself_pass_through_a_rebuild(tmp_path: Path) -> None:
    def pack_lost(kv: Kv) -> None:
        raise StorageError("pack 3f: I/O error", errno=errno.EIO, path="pack")

    with pytest.raises(StorageError, match="pack 3f"):
        home_of(tmp_path).rebuild(pack_lost)


# --- network file systems ---


def test_on_a_network_file_system_the_index_lies_in_the_local_cache(tmp_path: Path) -> None:
    store, cache = tmp_path / "store", tmp_path / "cache"
    store.mkdir()
    options = {"is_network": lambda path: path == str(store), "environ": {"XDG_CACHE_HOME": str(cache)}}
    folder = build(store, **options)
    assert folder.is_relative_to(cache / "casckpt")
    assert list(store.iterdir()) == []
    kv = home_of(store, **options).open()
    assert kv is not None
    kv.close()
    other = IndexHome(
        str(tmp_path / "other"), STORE, TABLES, is_network=lambda path: "cache" not in path, environ=options["environ"]
    )
    assert other.root not in (None, str(folder.parent))  # a second copy of the store has an index of its own


def test_without_any_local_folder_there_is_no_index_and_a_reason(tmp_path: Path) -> None:
    home = home_of(tmp_path, is_network=lambda path: True, environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert home.open() is None
    assert home.reason is not None
    assert "XDG_CACHE_HOME" in home.reason
    assert home.rebuild(fill) is None


def test_the_cache_folder_defaults_to_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/someone")
    root = index_root("/net/store", STORE, is_network=lambda path: path == "/net/store", environ={})
    assert root is not None
    assert root.startswith(f"/users/someone/.cache/casckpt/{STORE.hex()}-")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/data", "ext4"),
        ("/data/nfs", "nfs4"),
        ("/data/nfs/deep/er", "nfs4"),
        ("/data/nfsx", "ext4"),
        ("/net/with space/x", "fuse.sshfs"),
        ("/over", "tmpfs"),
    ],
)
def test_the_longest_and_last_mount_point_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "23 22 0:40 / /data/nfs rw - nfs4 server:/x rw\n"
        "24 22 0:41 / /net/with\\040space rw shared:2 master:3 - fuse.sshfs me@there: rw\n"
        "25 22 0:42 / /over rw - nfs server:/y rw\n"
        "26 22 0:43 / /over rw - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr("casckpt.index.place._MOUNTS", str(mounts))
    assert _mount_kind(path) == kind
