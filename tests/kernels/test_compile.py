"""When machine code is made, by whom, where it is kept; and that all works without."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from weft.kernels import cache, stamps
from weft.testing import processes

HEAD = """
import sys, torch
from weft import kernels
from weft.kernels.compile import compiler
from weft.kernels.ops import OPS
SUM = OPS["sum"]
def work():
    found = kernels.distinct(torch.tensor([7, 2, 7]))
    values = torch.tensor([1.0, 2.0, 4.0])
    assert kernels.reduce(values, found, SUM).tolist() == [2.0, 5.0]
    indices, values = kernels.merge([(found.indices, torch.ones(2))] * 2, SUM)
    assert indices.tolist() == [2, 7] and values.tolist() == [2.0, 2.0]
SMALL_SET = ("value", "f32", "f32", "sum", "f32")
def ready():
    return kernels.ready(torch.int64, torch.float32, SUM)
"""


def run(body, tmp_path, **env):
    """What a Python of its own prints, with a home that holds nothing yet."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("WEFT_", "NUMBA_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", HEAD + body],
        env={**keep, "HOME": str(home), "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def forked(size, body, tmp_path, **env):
    """What as many processes print that need not import torch and numba themselves first."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    return processes(size, program, HEAD + body, set(env), env={"HOME": str(home), **env})


def program(code, given):
    for name in os.environ:
        if name.startswith(("WEFT_", "NUMBA_", "XDG_")) and name not in given:
            del os.environ[name]
    warnings.simplefilter("error")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    return output.getvalue()


def test_importing_weft_kernels_does_not_import_numba(tmp_path):
    run("assert 'numba' not in sys.modules, 'numba'", tmp_path)


def test_without_numba_the_reference_serves(tmp_path):
    block = "sys.modules['numba'] = None\n"
    output = run(block + "kernels.warm(); work(); print(ready(), kernels.describe())", tmp_path)
    assert output.startswith("False torch operations (numba cannot be imported")


def test_a_broken_numba_is_like_none(tmp_path):
    (tmp_path / "numba.py").write_text("raise SystemError('numpy is too new')")
    body = "kernels.warm(); work(); print(ready(), kernels.describe())"
    output = run(body, tmp_path, PYTHONPATH=path_with(tmp_path))
    assert output.startswith("False torch operations (numba cannot be imported: numpy is too new")


def path_with(folder):
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def test_the_environment_can_keep_to_the_reference(tmp_path):
    body = "kernels.warm(); work(); print('numba' in sys.modules, ready(), kernels.describe())"
    output = run(body, tmp_path, WEFT_KERNELS="reference")
    assert output.startswith("False False torch operations (WEFT_KERNELS=reference)")


def test_the_first_calls_do_not_wait(tmp_path):
    """The reference serves while a thread compiles, which ends with the interpreter."""
    body = """
compiler._making.acquire()  # a compiler that takes for ever
assert compiler.busy
compiler._making.release()
assert not compiler.busy
compiler._making.acquire()
work()
assert compiler._thread.is_alive() and not ready() and compiler.busy
compiler._making.release()
"""
    run(body, tmp_path)


def test_the_background_makes_what_was_asked_for(tmp_path):
    body = """
import time
end = time.monotonic() + 50
while not ready() and time.monotonic() < end:
    work()
    time.sleep(0.05)
assert ready()
work()
while compiler.busy and time.monotonic() < end:
    time.sleep(0.05)
assert not compiler.busy
"""
    forked(1, body, tmp_path)


PREPARE = """
import logging
logging.getLogger("weft").setLevel(logging.INFO)
logging.getLogger("weft").addHandler(logging.StreamHandler(sys.stdout))
kernels.usual._sets = lambda pairs: [SMALL_SET]  # all of it takes longer
kept = kernels.kept()
begin = kernels.prepare()
print(kept, compiler.made(SMALL_SET), kernels.kept())
begin()
end = time.monotonic() + 50
while not compiler.made(SMALL_SET) and time.monotonic() < end:
    time.sleep(0.05)
assert compiler.made(SMALL_SET)
"""


def test_what_is_kept_is_not_waited_for(tmp_path):
    def prepared():
        return forked(1, f"import time\n{PREPARE}", tmp_path)

    words = "machine code is made, once on this machine: it takes ten seconds or so\n"
    assert prepared() == [f"{words}False True True\n"]  # nothing is kept: it is compiled at once
    assert prepared() == ["True False True\n"]
    [note] = (tmp_path / "home").rglob("complete")
    note.write_text("of a version that needed other loops")
    assert prepared() == [f"{words}False True True\n"]


COMPILE = """
import numba.core.compiler
before, count = numba.core.compiler.compile_extra, []
def counted(typing, target, function, *args, **options):
    if function.__module__.startswith("weft."):  # numba's own parts of them each process makes
        count.append(function)
    return before(typing, target, function, *args, **options)
numba.core.compiler.compile_extra = counted
compiler.make(SMALL_SET)
assert compiler.made(SMALL_SET)
print(len(count), kernels.describe())
"""


NO_COMPILER = """
import numba.core.compiler
def refuse(*args, **kwargs): raise AssertionError("compiled again")
numba.core.compiler.compile_extra = refuse
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache that one process filled, and what it said of that; not to be changed."""
    folder = tmp_path_factory.mktemp("compiled")
    return folder / "cache", forked(1, COMPILE, folder, WEFT_CACHE_DIR=str(folder / "cache"))[0]


def test_another_process_loads_what_one_compiled(tmp_path, compiled):
    cache, said = compiled
    assert f"kept in {cache}/kernels/" in said
    shutil.copytree(cache, tmp_path / "cache")
    body = "compiler.make(SMALL_SET); assert compiler.made(SMALL_SET)"
    where = {"WEFT_CACHE_DIR": str(tmp_path / "cache")}
    (directory,) = (tmp_path / "cache" / "kernels").iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    made = sorted(path.name for path in directory.iterdir())
    assert any(name.endswith(".nbc") for name in made)
    forked(1, NO_COMPILER + body, tmp_path, **where)
    assert sorted(path.name for path in directory.iterdir()) == made

    for path in directory.glob("*.nb?"):  # and damage is repaired
        path.write_bytes(path.read_bytes()[:-20] if path.suffix == ".nbc" else b"nonsense")
    forked(1, body, tmp_path, **where)
    forked(1, NO_COMPILER + body, tmp_path, **where)


def test_loops_for_lists_are_kept_too(tmp_path):
    where = {"WEFT_CACHE_DIR": str(tmp_path / "cache")}
    body = "compiler.make(('owned', 'f32', 'sum')); assert compiler.made(('owned', 'f32', 'sum'))"
    forked(1, body, tmp_path, **where)
    (directory,) = (tmp_path / "cache" / "kernels").iterdir()
    made = sorted(path.name for path in directory.iterdir())
    forked(1, NO_COMPILER + body, tmp_path, **where)
    assert sorted(path.name for path in directory.iterdir()) == made


def test_one_process_compiles_and_the_others_wait(tmp_path, compiled):
    where = {"WEFT_CACHE_DIR": str(tmp_path / "cache")}
    outputs = forked(2, COMPILE, tmp_path, **where)
    alone = int(compiled[1].split()[0])
    assert sum(int(output.split()[0]) for output in outputs) == alone  # they take turns by loops


def test_without_a_cache_it_compiles(tmp_path):
    body = """
compiler.make(SMALL_SET)
assert compiler.made(SMALL_SET)
print(kernels.describe())
"""
    (tmp_path / "file").write_text("")
    (output,) = forked(1, body, tmp_path, WEFT_CACHE_DIR=str(tmp_path / "file"))
    assert "kept in no cache" in output


def test_a_home_that_cannot_be_written_to(tmp_path):
    """The directory for temporary files serves; root can write everywhere, so /proc it is."""
    # the process that this one is forked of may have looked for it already
    body = "import tempfile; tempfile.tempdir = None; print(kernels.describe())"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (output,) = forked(1, body, tmp_path, HOME="/proc/1", TMPDIR=str(temporary))
    assert f"kept in {temporary}/weft-{os.geteuid()}/kernels" in output


def test_exit_while_compiling_is_quiet(tmp_path):
    assert run("work()", tmp_path) == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_child_works(tmp_path):
    body = """
import os, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
work()  # the compiler is at work
child = os.fork()
if child == 0:
    work()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""
    run(body, tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_child_keeps_no_turn_to_compile(tmp_path):
    """Others would wait a minute for each loop, as long as a worker that loads data lives."""

    def free():
        with open(tmp_path / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    mine, end = cache._turn, os.pipe()
    mine.take(tmp_path)
    child = os.fork()
    if child == 0:
        os.close(end[1])
        os.read(end[0], 1)  # until its parent closes the pipe
        os._exit(mine._file is not None)
    try:
        with pytest.raises(BlockingIOError):
            free()
        mine.give()
        free()
    finally:
        for fd in end:
            os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Whose directory it may be.


def test_a_directory_that_is_not_private_is_refused(tmp_path):
    (tmp_path / "kernels").mkdir(mode=0o755)
    (tmp_path / "kernels").chmod(0o755)
    with pytest.raises(PermissionError, match="is not a private directory"):
        cache._private(tmp_path / "kernels")


def test_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kernels").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is not a private directory"):
        cache._private(tmp_path / "kernels")


def test_a_directory_that_others_could_swap_is_refused(tmp_path):
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(PermissionError, match=f"others may rename what is in {parent}"):
        cache._private(parent / "kernels")
    parent.chmod(0o1777)  # sticky, as /tmp
    assert cache._private(parent / "kernels") == parent / "kernels"


def test_files_of_another_user_are_never_read(tmp_path, monkeypatch):
    path = cache._private(tmp_path / "kernels")
    monkeypatch.setattr(cache, "_user", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError):
        cache._private(path)


# Which versions are kept.


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Makes the folder of a stamp as another process would, unless it is to be held."""
    monkeypatch.setattr(stamps, "_held", {})

    def make(stamp, days=0.0, hold=False):
        path = stamps.folder(tmp_path, f"{stamp:016x}{'0' * 48}", cache._private)
        (path / "loop.nbc").write_text("machine code")
        os.utime(path / stamps._MARK, (time.time() - 86400 * days,) * 2)
        if not hold:
            os.close(stamps._held.pop(path))
        return path

    yield make
    for file in stamps._held.values():
        os.close(file)


def test_versions_have_folders_of_their_own(folders, monkeypatch):
    first, second = folders(1), folders(2)
    assert first != second and first.exists() and second.exists()
    cache._stamp.cache_clear()
    mine = cache._stamp()
    for change in (("_cpu", lambda: "another"), ("_SOURCES", ("machine.py",))):
        with monkeypatch.context() as patch:
            patch.setattr(cache, *change)
            cache._stamp.cache_clear()
            assert cache._stamp() != mine
    with monkeypatch.context() as patch:
        patch.setattr(cache.importlib.metadata, "version", lambda package: "0.1")
        cache._stamp.cache_clear()
        assert cache._stamp() != mine
    cache._stamp.cache_clear()


def test_old_folders_are_removed_and_used_ones_are_not(folders, tmp_path):
    old, used, young = folders(1), folders(2, days=99, hold=True), folders(3, days=29)
    os.utime(old / stamps._MARK, (time.time() - 86400 * 31,) * 2)
    other = tmp_path / "something else"
    other.mkdir()
    os.utime(other, (0, 0))
    folders(3)  # nothing new: nothing is looked at
    assert old.exists()
    folders(4)
    assert not old.exists()
    assert used.exists() and young.exists() and other.exists()
    assert (used / "loop.nbc").read_text() == "machine code"


def test_not_more_than_some_are_kept_the_last_used_ones(folders, tmp_path):
    made = [folders(number, days=number) for number in range(1, 12)]
    folders(99)
    assert [path.exists() for path in made] == [True] * stamps._KEPT + [False] * 3


def test_a_folder_that_is_being_removed_is_made_again(folders, tmp_path, monkeypatch):
    path = folders(1)
    removal = os.open(path / stamps._MARK, os.O_RDWR)
    fcntl.flock(removal, fcntl.LOCK_EX)

    def wait(seconds):
        shutil.rmtree(path)
        os.close(removal)

    with monkeypatch.context() as patch:
        patch.setattr(stamps.time, "sleep", wait)
        assert folders(1, hold=True) == path
    assert (path / stamps._MARK).exists()


def test_a_folder_that_was_removed_between_opening_and_locking_is_made_again(folders, monkeypatch):
    path, lock, gone = folders(1), fcntl.flock, []

    def late(file, how):
        if not gone:
            gone.append(path)
            shutil.rmtree(path)
        lock(file, how)

    with monkeypatch.context() as patch:
        patch.setattr(stamps.fcntl, "flock", late)
        folders(1, hold=True)
    assert gone and os.stat(path / stamps._MARK).st_ino == os.fstat(stamps._held[path]).st_ino


def test_the_stamp_covers_every_file_that_is_compiled():
    """Whatever the loops import of ours must be in it, else old machine code would be used."""
    here = Path(cache.__file__).parent
    for name in cache._SOURCES:
        imports = [
            line.split()[1].lstrip(".") + ".py"
            for line in (here / name).read_text().splitlines()
            if line.startswith("from .")
        ]
        assert set(imports) <= set(cache._SOURCES)


def test_the_compiler_leaves_standard_output_alone(tmp_path):
    colours = """
from unittest.mock import MagicMock
sys.modules["colorama"] = colorama = MagicMock(__version__="0.4.6")  # as if it were installed
class Codes:
    def __getattr__(self, name):
        return ""
colorama.Fore = colorama.Style = Codes()
compiler.make(SMALL_SET)
assert compiler.made(SMALL_SET)
assert not colorama.init.called and not colorama.reinit.called, "numba replaced sys.stdout"
"""
    run(colours, tmp_path)


def test_no_two_functions_have_one_name(tmp_path):
    body = """
from weft.kernels import talk_loops
keys = [("value", kind, kind, op, kind) for kind in ("f32", "f64") for op in ("sum", "max")]
keys += [("owned", "f32", "sum"), ("owned", "f64", "sum"), ("list",)]
for key in keys:
    compiler.make(key)
made = [loop.py_func for key in keys for loop in compiler.loops(key).values()]
made += [part for name, part in vars(talk_loops).items() if name.startswith("_add_")]
names = [(each.__module__, each.__qualname__) for each in made]
print(len(names), len(set(names)))
"""
    # numba tells them apart by a count in each process, and the cache brings several's together:
    # float64 was added where float32 was to be
    (said,) = forked(1, body, tmp_path)
    count, distinct = map(int, said.split())
    assert count == distinct == 25
