"""Requests begin one after the other, in the order of their arrival."""

from __future__ import annotations

import gevent
import gevent.socket

from container.front_end.connections import Entrance


def test_others_get_a_turn_between_requests_that_arrive_together() -> None:
    entrance, events = Entrance(), list[int | str]()
    client, health_check = gevent.socket.socketpair()

    def request(number: int) -> None:
        entrance.enter()
        events.append(number)
        if number == 0:
            client.send(b"x")

    def answer() -> None:
        health_check.recv(1)
        events.append("ping")

    with client, health_check:
        greenlets = [gevent.spawn(answer), *(gevent.spawn(request, n) for n in range(50))]
        gevent.joinall(greenlets, timeout=60, raise_error=True)
    assert [event for event in events if event != "ping"] == [*range(50)]
    assert events.index("ping") < 5


def test_a_connection_that_ends_while_it_waits_is_passed_over() -> None:
    entrance, entered = Entrance(), list[int]()

    def request(number: int) -> None:
        entrance.enter()
        entered.append(number)

    first, ended, last = (gevent.spawn(request, number) for number in range(3))
    gevent.sleep(0)
    ended.kill()
    gevent.joinall([first, last], timeout=60, raise_error=True)
    assert entered == [0, 2]
