"""The shared-file rendezvous and the door that it leads to: what is believed, and what is not."""

from __future__ import annotations

import functools
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from weft.bootstrap import file
from weft.bootstrap.door import Door, knock
from weft.bootstrap.file import Invitation, claim, find, read, withdraw
from weft.errors import WeftError, WireError

NONCE = bytes(range(32))


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door(NONCE, {"port": 7}, address="127.0.0.1")
    yield made
    made.close()


def invitation(port: int, nonce: bytes = NONCE) -> Invitation:
    return Invitation(("127.0.0.1",), port, nonce.hex(), "node1", 12, 0.0)


def soon(seconds: float = 0.3) -> float:
    return time.monotonic() + seconds


# The door.


def test_a_door_tells_who_knows_its_nonce(door: Door) -> None:
    assert knock(["127.0.0.1"], [door.port], NONCE, 5.0) == ("127.0.0.1", {"port": 7})
    assert knock(["127.0.0.1"], [door.port], b"another", 5.0) is None
    with Silent("127.0.0.1") as silent:  # the first that answers with the right proof is taken
        places = ["127.0.0.1"], [silent.port, door.port]
        assert knock(*places, NONCE, 0.1) == ("127.0.0.1", {"port": 7})


def test_a_door_is_not_held_up_by_strangers(door: Door) -> None:
    with socket.create_connection(("127.0.0.1", door.port)) as stranger:
        stranger.send(b"GET")
        assert knock(["127.0.0.1"], [door.port], NONCE, 5.0) is not None
    assert knock(["127.0.0.1"], [door.port], NONCE, 5.0) is not None
    door.close()
    door.close()
    assert knock(["127.0.0.1"], [door.port], NONCE, 5.0) is None


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_a_door_is_there_for_ipv4_and_ipv6() -> None:
    made = Door(NONCE, {})
    try:
        for address in ("127.0.0.1", "::1"):
            assert knock([address], [made.port], NONCE, 5.0) == (address, {})
    finally:
        made.close()


class Silent:
    """A program that listens and, if so told, sends back what it gets."""

    def __init__(self, address: str, *, echo: bool = False) -> None:
        self._listener = socket.create_server((address, 0))
        self._echo, self.port = echo, self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        with self._listener.accept()[0] as sock:
            while chunk := sock.recv(1024):
                sock.sendall(chunk)

    def __enter__(self) -> Silent:
        if self._echo:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._echo:
            self._thread.join(5)
        self._listener.close()


def test_an_echo_proves_nothing() -> None:
    with Silent("127.0.0.1", echo=True) as echo:
        assert knock(["127.0.0.1"], [echo.port], NONCE, 0.3) is None


# The file.


def test_a_file_is_written_whole_and_for_this_user_alone(tmp_path: Path, door: Door) -> None:
    path = tmp_path / "run7"
    old = os.umask(0)
    try:
        assert claim(path, invitation(door.port)) is None
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["run7"]
    assert find(path, 1, soon()) == ("127.0.0.1", {"port": 7})
    withdraw(path, invitation(door.port + 1))  # another's stays
    assert path.exists()
    withdraw(path, invitation(door.port))
    withdraw(path, invitation(door.port))
    assert os.listdir(tmp_path) == []


def test_a_file_of_a_crashed_run_is_waited_past_and_replaced(tmp_path: Path, door: Door) -> None:
    path = tmp_path / "run7"
    stale = invitation(door.port, b"of a run that is over")  # its port is another's by now
    assert claim(path, stale) is None
    with pytest.raises(
        WireError, match=r"rank 3: waited 0 s for rank 0 at file://.*run7; the fil"
    ) as info:
        find(path, 3, soon())
    assert "that of process 12 on node1, written 1970-01-01" in str(info.value)
    assert info.value.culprit == 0
    late = threading.Timer(0.3, claim, [path, invitation(door.port)])
    late.start()
    assert find(path, 3, soon(10.0)) == ("127.0.0.1", {"port": 7})
    late.join()


def test_what_cannot_be_taken_away_is_complained_of(
    tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    stale = invitation(door.port, b"stale")
    assert claim(path, stale) is None

    def refuse(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "rename", refuse)  # as for a file that is immutable
    with pytest.raises(WeftError, match="does not answer, and cannot be taken away: remove it"):
        claim(path, invitation(door.port))
    assert os.listdir(tmp_path) == ["run"]


def test_of_two_that_would_be_rank_0_one_finds_the_other(tmp_path: Path, door: Door) -> None:
    path = tmp_path / "run7"
    first, second = invitation(door.port), replace(invitation(door.port), pid=13)
    assert claim(path, first) is None
    assert claim(path, second) == first
    assert read(path) == first


def refused(*_: object) -> None:
    raise PermissionError("no links here")


def test_a_file_system_without_links_will_do(
    tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refused)
    path, mine = tmp_path / "run7", invitation(door.port)
    assert claim(path, replace(mine, nonce=b"stale".hex())) is None
    assert claim(path, mine) is None
    assert claim(path, replace(mine, pid=13)) == mine


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_is_not_taken_away_in_place_of_an_old_one(
    links: bool, tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came between the look and the taking away; without links it was lost."""
    if not links:
        monkeypatch.setattr(os, "link", refused)
    path, rename = tmp_path / "run7", os.rename
    stale, new = invitation(door.port, b"stale"), invitation(door.port)
    assert claim(path, stale) is None

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        path.write_text(new.to_json())
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    withdraw(path, stale)
    assert read(path) == new
    assert os.listdir(tmp_path) == ["run7"]


def test_a_link_that_was_made_though_its_answer_was_lost_is_no_other_rank_0(
    tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS asks again, and hears that the file is there."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert claim(tmp_path / "run7", invitation(door.port)) is None


def rewrite(path: Path, **part: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **part}))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda path: path.write_text("{"), "is not a file of a rendezvous"),
        (lambda path: path.write_text('{"port": 1}'), "is not a file of a rendezvous"),
        *[
            (functools.partial(rewrite, **part), "is not a file of a rendezvous")
            for part in (
                {"addresses": [3]},
                {"addresses": "127.0.0.1"},  # its characters
                {"nonce": "no hexadecimal"},
                {"nonce": 7},
                {"port": 70000},
                {"port": "x"},
                {"written": "x"},
                {"written": 1e300},
            )
        ],
        (lambda path: path.chmod(0o622), "may be written by others .mode 622."),
        (lambda path: (path.rename(f"{path}x"), path.symlink_to(f"{path}x")), "is a link, and may"),
        (lambda path: (path.unlink(), path.mkdir()), "is no regular file"),
    ],
)
def test_what_is_not_believed(tmp_path: Path, door: Door, spoil: object, complaint: str) -> None:
    path = tmp_path / "run7"
    claim(path, invitation(door.port))
    spoil(path)
    with pytest.raises(WeftError, match=complaint):
        find(path, 1, soon())
    with pytest.raises(WeftError, match=complaint):
        claim(path, invitation(door.port))


def test_a_file_of_another_user_is_refused(
    tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run7"
    claim(path, invitation(door.port))
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    for attempt in (lambda: find(path, 1, soon()), lambda: claim(path, invitation(door.port))):
        with pytest.raises(WeftError, match=f"belongs to user {me} and this is user {me + 1}"):
            attempt()


@pytest.mark.parametrize(
    ("name", "why"), [("run7", "there is no such file"), ("a/run7", "there is no folder .*/a on")]
)
def test_a_rank_that_waits_says_for_whom(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(WireError, match=rf"rank 2: waited 0 s for rank 0 at .*; {why}"):
        find(tmp_path / name, 2, soon(0.1))


def test_a_rank_that_waits_says_where_only_rank_0_itself_can_call(
    tmp_path: Path, door: Door
) -> None:
    path = tmp_path / "run7"
    silent = invitation(door.port, b"another's")
    claim(path, silent)
    with pytest.raises(WireError, match=r"127.0.0.1 port \d+: only its own host reaches it there"):
        find(path, 1, soon(0.1))
    claim(path, replace(silent, host=socket.gethostname()))  # whom it would lead astray
    with pytest.raises(WireError, match=r"is that an earlier run, or one behind a firewall"):
        find(path, 1, soon(0.1))


def test_looks_are_made_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(file.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(file.time, "sleep", sleep)
    with pytest.raises(WireError, match="waited 60 s"):
        find(tmp_path / "run7", 1, 60.0)
    assert pauses[0] <= 0.01
    assert 0.5 <= pauses[-2] <= 1.0
    assert 60 <= len(pauses) <= 150
