"""The choice of a server: as verl's own balancer where no server is to be avoided."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.workers.rollout.router import GlobalRequestLoadBalancer, RequestLoadBalancer

from verl_atgrpo.train.serving.balancer import AvoidingBalancer


def handle(name: str) -> Any:
    return SimpleNamespace(_actor_id=name.encode())


SERVERS = {name: handle(name) for name in "abc"}


@pytest.mark.parametrize("seed", range(3))
def test_it_chooses_as_verls_balancer_does(seed: int) -> None:
    ours, theirs = AvoidingBalancer(SERVERS, 5), GlobalRequestLoadBalancer(SERVERS, 5)
    rng, held = random.Random(seed), list[tuple[str, str]]()
    for step in range(600):
        what = rng.choice(["acquire", "acquire", "acquire", "release", "remove", "add", "forget"])
        request = f"request {rng.randrange(8)}"
        if what == "acquire" and ours.get_all_servers():
            found = []
            for balancer in (ours, theirs):
                random.seed(step)
                found.append(balancer.acquire_server(request))
            assert found[0] == found[1]
            held.append((found[0][0], request))
        elif what == "release" and held:
            server, request = held.pop(rng.randrange(len(held)))
            for balancer in (ours, theirs):
                balancer.release_server(server, request)
        elif what in ("remove", "add") and not step % 10:
            name = rng.choice("abc")
            for balancer in (ours, theirs):
                if what == "remove":
                    balancer.remove_servers([name])
                else:
                    balancer.add_servers({name: SERVERS[name]})
        elif what == "forget" and not step % 20:
            assert ours.clear_sticky_cache() == theirs.clear_sticky_cache()
        assert ours.get_status()["servers"] == theirs.get_status()["servers"]
        assert ours.get_total_inflight() == theirs.get_total_inflight()
    assert len(held) > 20


def test_a_request_moves_from_servers_that_it_avoids_and_stays_where_it_went() -> None:
    balancer = AvoidingBalancer({name: SERVERS[name] for name in "ab"})
    (first, _) = balancer.acquire_server("r")
    other = "b" if first == "a" else "a"
    balancer.acquire_server("busy", avoid=[first])
    assert balancer.acquire_server("r")[0] == first
    assert balancer.acquire_server("r", avoid=[first])[0] == other
    assert balancer.acquire_server("r")[0] == other
    with pytest.raises(RuntimeError, match="no server is left"):
        balancer.acquire_server("r", avoid=["a", "b"])
    assert balancer.get_status()["servers"] == {first: 2, other: 3}


def test_a_handle_that_the_client_has_is_not_sent_again() -> None:
    balancer = AvoidingBalancer({"a": SERVERS["a"]})
    assert balancer.acquire_server("r", known=[b"b".hex()]) == ("a", SERVERS["a"])
    assert balancer.acquire_server("r", known=[b"a".hex()]) == ("a", None)


def test_it_has_what_verl_calls() -> None:
    methods = {name: found for name, found in vars(RequestLoadBalancer).items() if inspect.isfunction(found)}
    called = {name: inspect.signature(found) for name, found in methods.items() if not name.startswith("_")}
    assert len(called) == 10
    for name, signature in called.items():
        named = [one.name for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        assert named == list(inspect.signature(getattr(AvoidingBalancer, name)).parameters)[: len(named)], name
