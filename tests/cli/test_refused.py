"""What the commands refuse: exit status 2, what is wrong and with which option, and no more."""

import shlex

import pytest

from weft import cli


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bench --case uniform,nope", "unknown 'nope': choose from uniform, zipf, small"),
        ("bench --case ,", "unknown '': choose from uniform"),
        ("bench --algorithm nope", "unknown 'nope': choose from auto, "),
        ("bench --peers mpi", "unknown 'mpi': choose from torch, horovod, dense"),
        ("bench --ranks 0", "argument --ranks: '0' is no number above 0"),
        ("bench --iters -1", "argument --iters: "),
        ("bench --width many", "argument --width: 'many' is no number above 0"),
        ("demo --ranks 0", "argument --ranks: "),
        ("demo --steps -1", "argument --steps: "),
        ("demo --out /dev/null/out", "weft demo: [Errno "),
        ("plan", "invalid choice: 'plan'"),
        ("", "required: COMMAND"),
    ],
)
def test_refused_with_status_2(
    line,
    words,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(line))
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert words in err and out == ""
    assert not list(tmp_path.iterdir())
