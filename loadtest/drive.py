"""Drives a session with locust's runner, in this process."""

from __future__ import annotations

import logging

from loadtest.session import Session
from loadtest.user import LoadUser, SessionEnvironment

GRACE_S = 5.0
"""For users to end once the session has, before they are ended."""


def drive(session: Session, users: int) -> None:
    """Returns once everything is sent and answered; stops the users if interrupted."""
    for name in ("locust", "locust.runners"):
        logging.getLogger(name).setLevel(logging.WARNING)
    environment = SessionEnvironment(user_classes=[LoadUser], stop_timeout=0)
    environment.session = session
    runner = environment.create_local_runner()
    try:
        runner.start(users, spawn_rate=users)
        session.finished.wait()
    finally:
        runner.quit()
        runner.greenlet.join(GRACE_S)
