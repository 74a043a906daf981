"""`weft.rendezvous.address`: where a rank listens."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from weft.base.pace import patient
from weft.rendezvous import address
from weft.rendezvous.address import Interface, interface_of, interfaces, own_address

LOOPBACK = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch):
    for variable in address.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def machine(monkeypatch):
    """A machine whose own addresses, and ways to hosts, are as told."""

    def make(*own, here=(), **ways):
        monkeypatch.setattr(address, "addresses_of_machine", lambda: iter(own))
        monkeypatch.setattr(address, "leads_here", lambda address: address in here)
        monkeypatch.setattr(address, "address_towards", lambda host, port: ways.get(host))
        monkeypatch.setattr(address, "server_of", lambda store: (next(iter(ways), None), 1))

    return make


@pytest.mark.parametrize("variable", address.VARIABLES)
@pytest.mark.parametrize("named", [LOOPBACK, f"nothing7,{LOOPBACK}", "127.0.0.1"])
def test_an_interface_or_an_address_may_be_named(monkeypatch, variable, named):
    monkeypatch.setenv(variable, named)
    assert own_address(dist.HashStore()) == "127.0.0.1"


@pytest.fixture
def network(monkeypatch):
    """A machine with these interfaces, whose way to the store's host is by one of them."""
    there = (
        Interface("lo", ("127.0.0.1", "::1")),
        Interface("docker0", ("172.17.0.1",)),
        Interface("eth0", ("10.0.0.7", "fd00::7")),
        Interface("ib0", ("10.1.0.7",)),
    )

    def make(route):
        monkeypatch.setattr(address, "interfaces", lambda: there)
        monkeypatch.setattr(address, "server_of", lambda store: ("node1", 1))
        monkeypatch.setattr(address, "address_towards", lambda host, port: route)
        everything = [each for one in there for each in one.addresses]
        monkeypatch.setattr(address, "addresses_of_machine", lambda: iter(everything))
        monkeypatch.setattr(address, "leads_here", lambda each: not address.is_loopback(each))

    return make


@pytest.mark.parametrize(
    ("named", "route", "taken"),
    [
        (None, "10.0.0.7", "10.0.0.7"),
        (None, "fd00::7", "fd00::7"),
        (None, "127.0.1.1", "172.17.0.1"),
        ("ib0", "10.0.0.7", "10.1.0.7"),
        ("eth", "10.1.0.7", "10.0.0.7"),
        ("eth0", "fd00::7", "fd00::7"),  # of an interface's addresses, the one that leads there
        ("ib9, eth0", "10.1.0.7", "10.0.0.7"),
        ("^docker", "172.17.0.1", "10.0.0.7"),
        ("^docker", "10.1.0.7", "10.1.0.7"),
        ("^docker,eth", "172.17.0.1", "10.1.0.7"),
        ("^docker,^eth0", "fd00::7", "10.1.0.7"),
    ],
)
def test_what_is_taken_for_a_host_elsewhere(network, monkeypatch, named, route, taken):
    network(route)
    if named is not None:
        monkeypatch.setenv("SAR_SOCKET_NAME", named)
    assert own_address(dist.HashStore()) == taken


def test_what_leaves_nothing_is_said(network, monkeypatch):
    network("10.0.0.7")
    monkeypatch.setenv("WEFT_INTERFACE", "^docker,eth,ib,lo")
    with pytest.raises(OSError, match=r"=\^docker,eth,ib,lo leaves no interface: there are lo"):
        own_address(dist.HashStore())


def test_this_machine_s_interfaces_are_found():
    loopback = next(each for each in interfaces() if each.name == LOOPBACK)
    assert loopback.addresses[0] == "127.0.0.1"
    assert interface_of("127.0.0.1") == LOOPBACK
    assert interface_of("192.0.2.77") is None


def test_weft_s_own_variable_wins(monkeypatch):
    monkeypatch.setenv("WEFT_INTERFACE", "127.0.0.5")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing7")
    assert own_address(dist.HashStore()) == "127.0.0.5"


def test_an_interface_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setenv("WEFT_INTERFACE", "nothing7")
    with pytest.raises(OSError, match=f"WEFT_INTERFACE=nothing7 names no.*there are .*{LOOPBACK}"):
        own_address(dist.HashStore())


def test_an_address_of_another_machine_is_said(monkeypatch):
    monkeypatch.setenv("WEFT_INTERFACE", "192.0.2.77")
    with pytest.raises(OSError, match=rf"=192.0.2.77 names no .*{LOOPBACK} \(127\.0\.0\.1\)"):
        own_address(dist.HashStore())
    # so that one list is right on several machines
    monkeypatch.setenv("WEFT_INTERFACE", "192.0.2.77,127.0.0.1")
    assert own_address(dist.HashStore()) == "127.0.0.1"


def test_the_way_to_the_store_s_host_is_taken():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "127.0.0.1"


def test_the_store_s_own_host_takes_what_others_can_reach(machine):
    machine("127.0.1.1", "10.0.0.7", here=("10.0.0.7",), node7="127.0.1.1")
    assert own_address(dist.HashStore()) == "10.0.0.7"


def test_a_loopback_that_is_meant_is_taken(machine):
    machine("10.0.0.7", here=("10.0.0.7",), localhost="127.0.0.1")
    assert own_address(dist.HashStore()) == "127.0.0.1"


def test_a_host_without_any_other_address_takes_the_loopback(machine):
    machine("127.0.1.1", "10.0.0.7")
    assert own_address(dist.HashStore()) == "127.0.0.1"


def test_what_leads_nowhere_is_passed_over():
    assert address.address_towards("host.invalid", 80) is None
    assert not address.leads_here("192.0.2.1") and not address.leads_here("127.0.0.1")


def test_a_name_that_no_server_answers_for_is_not_waited_for(monkeypatch, caplog):
    released = threading.Event()
    threads = []
    answered = []
    look_up = socket.getaddrinfo

    def hanging(host, *args, **options):
        if host == "node1.example" and not options.get("flags"):
            threads.append(threading.current_thread())
            released.wait(patient(20.0))
            answered.append(host)
            host = "127.0.0.1"
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    monkeypatch.setattr(address, "LOOKUP", 0.2)
    monkeypatch.setattr(address, "server_of", lambda store: ("node1.example", 1))
    assert address.is_own(own_address(dist.HashStore()))
    assert answered == []
    assert [thread.daemon for thread in threads] == [True]  # it keeps no program from ending
    assert "within 0.2 s what node1.example is" in caplog.text
    released.set()
