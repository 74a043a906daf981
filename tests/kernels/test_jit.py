"""Machine code is made once, and kept where nobody else can write; all works without."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import subprocess
import sys
import warnings

import pytest

from weft.base.pace import patient
from weft.kernels import jit
from weft.testing import processes

HEAD = """
import sys, torch
from weft import kernels
from weft.kernels import OPS, jit
jit.machine_code.cache_clear()  # nothing of the process that this one is forked of
def work():
    found = kernels.distinct(torch.tensor([7, 2, 7]))
    values = torch.tensor([1.0, 2.0, 4.0])
    assert kernels.reduce(values, found, OPS["sum"]).tolist() == [2.0, 5.0]
    union = kernels.union([found.indices] * 2)
    assert union.indices.tolist() == [2, 7]
def count():
    jit.USUAL = ("look", "put")  # compiling all takes longer
    made, compiled = [], jit.compiled
    jit.compiled = lambda *given: [made.append(1), compiled(*given)][1]
    assert sorted(jit.loops()) == ["look", "put"]
    print(len(made), kernels.describe())
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
        timeout=patient(100.0),
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def forked(size, body, tmp_path, **env):
    """What as many processes print that need not import torch themselves first."""
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


@pytest.mark.parametrize(
    ("before", "env", "reason"),
    [
        ("sys.modules['numba'] = None", {}, "ModuleNotFoundError: "),
        ("sys.modules['llvmlite'] = None", {}, "ModuleNotFoundError: import of llvmlite halted"),
        (
            "jit.cache_directory = lambda: None; jit.compiled = lambda *given: 1 / 0",
            {},
            "ZeroDivisionError: division by zero",
        ),
        ("", {"WEFT_KERNELS": "reference"}, "WEFT_KERNELS=reference"),
    ],
)
def test_without_machine_code_the_reference_serves(tmp_path, before, env, reason):
    body = f"{before}\nwork(); print(kernels.describe())"
    (output,) = forked(1, body, tmp_path, **env)
    assert output.startswith(f"torch operations ({reason}")


def test_a_broken_numba_is_like_none(tmp_path):
    (tmp_path / "numba.py").write_text("raise SystemError('numpy is too new')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    output = run("work(); print(kernels.describe())", tmp_path, PYTHONPATH=path)
    assert "kernels are torch operations, which take longer: SystemError" in output  # one line
    assert "torch operations (SystemError: numpy is too new)" in output


def test_the_choice_stays(tmp_path):
    body = """
import os
os.environ["WEFT_KERNELS"] = "reference"
work()
del os.environ["WEFT_KERNELS"]
assert jit.loops() is None
"""
    forked(1, body, tmp_path)


def test_another_process_loads_what_one_compiled(tmp_path):
    where = {"WEFT_CACHE_DIR": str(tmp_path / "cache")}
    body = "count(); print('numba' in sys.modules)"
    words = f"numba {jit.importlib.metadata.version('numba')}, kept in {tmp_path}/cache/kernels;"
    (first,) = forked(1, body, tmp_path, **where)
    assert first.startswith(f"2 {words}") and first.endswith("True\n")
    (second,) = forked(1, body, tmp_path, **where)
    assert second.startswith(f"0 {words}") and second.endswith("False\n")

    kept = next((tmp_path / "cache" / "kernels").glob("*/put"))
    for folder in (kept.parent, kept.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for damaged in (b"", kept.read_bytes()[:-20], b"nonsense" * 100):  # it is repaired
        kept.write_bytes(damaged)
        assert forked(1, "count()", tmp_path, **where)[0].startswith("1 ")
        assert forked(1, "count()", tmp_path, **where)[0].startswith("0 ")


def test_one_process_compiles_and_the_others_wait(tmp_path):
    outputs = forked(3, "count()", tmp_path, WEFT_CACHE_DIR=str(tmp_path / "cache"))
    assert sorted(int(output.split()[0]) for output in outputs) == [0, 0, 2]


def test_without_a_cache_it_compiles(tmp_path):
    (tmp_path / "file").write_text("")
    (output,) = forked(1, "count()", tmp_path, WEFT_CACHE_DIR=str(tmp_path / "file"))
    assert output.startswith("2 ") and "kept in no cache" in output


def test_a_lock_that_is_held_for_long_is_not_waited_for(tmp_path):
    body = """
import filelock
jit.WAIT = 0.1
held = filelock.FileLock(f"{jit.folder_of_instances()}.{jit.USUAL[0]}.lock")
class Waited(filelock.FileLock):
    def acquire(self, *given, **named):
        try:
            return super().acquire(*given, **named)
        except filelock.Timeout:
            print("not had")
            raise
with held:
    filelock.FileLock = Waited
    count()
"""
    (output,) = forked(1, body, tmp_path)
    assert output.startswith("not had\n2 ")


def test_a_home_that_cannot_be_written_to(tmp_path):
    """The directory for temporary files serves; root can write everywhere, so /proc it is."""
    # the process that this one is forked of may have looked for it already
    body = "import tempfile; tempfile.tempdir = None; print(jit.cache_directory())"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (output,) = forked(1, body, tmp_path, HOME="/proc/1", TMPDIR=str(temporary))
    assert output.strip() == f"{temporary}/weft-{os.geteuid()}/kernels"


def test_a_fork_waits_until_what_a_thread_makes_is_there(tmp_path):
    body = """
import os, threading
jit.USUAL = ("look", "put")
makes, compiled = threading.Event(), jit.compiled
def slowly(*given):
    makes.set()
    return compiled(*given)
jit.compiled = slowly
thread = threading.Thread(target=jit.loops)
thread.start()
makes.wait()
if (child := os.fork()) == 0:
    jit.compiled = None
    os._exit(sorted(jit.loops()) == ["look", "put"])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
thread.join()
"""
    run(f"import warnings; warnings.simplefilter('ignore')\n{body}", tmp_path)


# Whose directory it may be.


def test_a_directory_that_is_not_private_is_refused(tmp_path):
    (tmp_path / "kernels").mkdir(mode=0o755)
    (tmp_path / "kernels").chmod(0o755)
    with pytest.raises(PermissionError, match="is not a private directory"):
        jit.private_folder(tmp_path / "kernels")


def test_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kernels").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is not a private directory"):
        jit.private_folder(tmp_path / "kernels")


def test_a_directory_that_others_could_swap_is_refused(tmp_path):
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(PermissionError, match=f"others may rename what is in {parent}"):
        jit.private_folder(parent / "kernels")
    parent.chmod(0o1777)  # sticky, as /tmp
    assert jit.private_folder(parent / "kernels") == parent / "kernels"


def test_files_of_another_user_are_never_read(tmp_path, monkeypatch):
    path = jit.private_folder(tmp_path / "kernels")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(PermissionError):
        jit.private_folder(path)


# What is kept.


def test_what_it_was_made_of_is_in_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "digest_of_makers", jit.digest_of_makers.__wrapped__)
    mine = jit.folder_of_instances()
    assert mine == jit.folder_of_instances()
    changes = (
        ("name_of_cpu", lambda: "another"),
        ("version_of", lambda package: "0.1"),
        ("SOURCES", ("loops.py",)),
    )
    for change in changes:
        with monkeypatch.context() as patch:
            patch.setattr(jit, *change)
            assert jit.folder_of_instances() != mine


# Instances that are not usual are made when they are asked for.


def test_another_instance_is_made_when_it_is_asked_for(tmp_path):
    body = """
jit.USUAL = ("look",)
loops = jit.loops()
assert loops["put"] is not None and sorted(loops) == ["look", "put"]
jit.compiled = lambda *given: 1 / 0
permuted = kernels.Distinct(torch.tensor([3, 4]), torch.tensor([1, 0]), None)
values = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
assert kernels.reduce(values, permuted, OPS["sum"]).tolist() == [[3.0, 4.0], [1.0, 2.0]]
assert loops["take.rows.f64.f64"] is None
print("fine")
"""
    (output,) = forked(1, body, tmp_path)
    assert output.endswith("fine\n")


def test_without_a_home_the_folder_for_temporary_files_serves_or_the_other(tmp_path):
    body = """
import os, tempfile
def nowhere(*given):
    raise FileNotFoundError("no usable temporary directory found")
def homeless(path):
    return path  # as for a user without an entry, and without HOME
expanduser, temporary = os.path.expanduser, tempfile.gettempdir
os.path.expanduser = homeless
print(jit.cache_directory())
os.path.expanduser, tempfile.gettempdir = expanduser, nowhere
print(jit.cache_directory())
os.path.expanduser = homeless
print(jit.cache_directory())
"""
    (output,) = forked(1, body, tmp_path, TMPDIR=str(tmp_path))
    first, second, third = output.splitlines()
    assert first.endswith(f"/weft-{os.geteuid()}/kernels")
    assert second == f"{tmp_path}/home/.cache/weft/kernels"
    assert third == "None"
