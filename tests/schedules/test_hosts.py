"""Who is on which host: told once, the same on every rank."""

from __future__ import annotations

import pytest

from weft.bootstrap.outcome import results
from weft.schedules.hosts import Hosts, hosts_of
from weft.testing import spmd, threads
from weft.testing.threads import on_groups


def found(group):
    sent = group.traffic.messages
    hosts = hosts_of(group)
    assert group.traffic.messages == sent
    return hosts


def test_ranks_are_told_apart_by_the_names_of_their_hosts():
    groups = threads.group(5, hosts=["red", "blue", "red", "green", "blue"])
    for hosts in results(on_groups(groups, found), "threads"):
        assert hosts == Hosts((0, 1, 0, 2, 1))
        assert hosts.ranks == ((0, 2), (1, 4), (3,))


@spmd(1, 3)
def test_ranks_of_one_machine_are_on_one_host(group):
    hosts = found(group)
    assert hosts == Hosts((0,) * group.size)


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 0), (0, 1, 2)])
@spmd(3, on=("processes",))
def test_the_environment_names_a_host(group, hosts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_HOST", str(hosts[group.rank]))
        joined = group.split(range(3))
    with joined as part:
        assert found(part) == Hosts(hosts)
        if group.rank != 1:
            assert found(part.subset([2, 0])) == Hosts((0, int(hosts[2] != hosts[0])))


def test_some_ranks_have_the_hosts_that_they_have_among_all():
    groups = threads.group(5, hosts=["red", "blue", "red", "green", "blue"])
    assert hosts_of(groups[2].subset([4, 2, 1])).ranks == ((0, 2), (1,))
