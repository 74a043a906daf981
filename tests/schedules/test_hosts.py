"""Who is on which host: told once, the same on every rank."""

from __future__ import annotations

from weft.bootstrap.outcome import results
from weft.schedules.hosts import Hosts, hosts_of
from weft.testing import spmd, threads
from weft.testing.threads import on_groups


def found(group):
    hosts = hosts_of(group)
    sent = group.traffic.messages
    assert hosts_of(group) is hosts  # who asks again sends nothing
    assert group.traffic.messages == sent
    return hosts


def test_ranks_are_told_apart_by_the_names_of_their_hosts():
    groups = threads.group(5, hosts=["red", "blue", "red", "green", "blue"])
    for hosts in results(on_groups(groups, found), "threads"):
        assert hosts == Hosts((0, 1, 0, 2, 1))
        assert hosts.ranks == ((0, 2), (1, 4), (3,))
        assert not hosts.in_order


@spmd(1, 3)
def test_ranks_of_one_machine_are_on_one_host(group):
    hosts = found(group)
    assert hosts == Hosts((0,) * group.size) and hosts.in_order


def test_the_environment_names_a_host(monkeypatch):
    monkeypatch.setenv("WEFT_HOST", "everywhere")
    groups = threads.group(2, hosts=["red", "blue"])
    assert results(on_groups(groups, found), "threads") == [Hosts((0, 0))] * 2
