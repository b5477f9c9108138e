"""The application with the user's hooks around every route, as AWS's containers have them.

The hooks run after the API key has been checked. If a route fails, they see the error's response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from flask import Flask, Response, g, request

from container.hooks.calls import call, takes_request
from container.hooks.load import Function, Hooks
from container.hooks.starlette_api import HookRequest, HookResponse, as_response
from container.http.request_context import client_body
from core.errors import GenerationError
from core.foreign_code import contained

Respond = Callable[[HookRequest], object]
"""A function that returns the response to a request. It is the routes, or a hook around them."""


class HookedFlask(Flask):
    """A Flask application whose routes are called through the hooks."""

    def __init__(self, name: str, hooks: Hooks) -> None:
        super().__init__(name, static_folder=None)
        self._hooks = hooks

    def dispatch_request(self) -> Response:
        """Answer the current request. Called by Flask, which handles what this raises."""
        answered: list[Response] = []
        g.context.send_chunk = None  # a hook may change each part of a stream

        def routes(hook_request: HookRequest) -> object:
            answered.append(self._answer(hook_request))
            return HookResponse(answered[-1])

        response: Response | None = None
        try:
            response = as_response(self._with_hooks(routes)(HookRequest(request, client_body)))
            return response
        finally:
            for other in answered:
                if other is not response:
                    other.close()  # a stream that nobody will read

    def _answer(self, hook_request: HookRequest) -> Response:
        """Return the response of the route, or of the error that it raises."""
        body = hook_request.known_body
        if body is not None:
            g.context.read_body = lambda: body
        try:
            response = self.make_response(super().dispatch_request())
        except Exception as error:
            response = self.make_response(self.handle_user_exception(error))
        ping = self._hooks.ping_hook
        if ping is None or request.path != "/ping" or response.status_code != 200:
            return response
        arguments = [hook_request][: takes_request(ping)]
        return _call("ping_hook", ping, *arguments).inner

    def _with_hooks(self, routes: Respond) -> Respond:
        """Wrap the routes in the hooks. The throttle hook is the outermost."""
        hooks, respond = self._hooks, routes
        if hooks.pre_process_hook is not None:
            respond = _with_pre_process(hooks.pre_process_hook, respond)
        if hooks.post_process_hook is not None:
            respond = _with_post_process(hooks.post_process_hook, respond)
        if hooks.pre_post_process_hook is not None:
            hook = hooks.pre_post_process_hook
            respond = _with_middleware("pre_post_process_hook", hook, respond)
        if hooks.throttle_hook is not None:
            respond = _with_middleware("throttle_hook", hooks.throttle_hook, respond)
        return respond


def _with_pre_process(function: Function, inner: Respond) -> Respond:
    def respond(hook_request: HookRequest) -> object:
        returned = call("pre_process_hook", function, hook_request)
        if returned is not hook_request:
            raise GenerationError(
                f"option.pre_process_hook: returned {returned!r:.100} instead of its request"
            )
        return inner(hook_request)

    return respond


def _with_post_process(function: Function, inner: Respond) -> Respond:
    return lambda hook_request: _call("post_process_hook", function, inner(hook_request))


def _with_middleware(option: str, middleware: Function, inner: Respond) -> Respond:
    def respond(hook_request: HookRequest) -> object:
        return _call(option, middleware, hook_request, call_next)

    def call_next(hook_request: HookRequest) -> Awaitable[object]:
        async def answer() -> object:
            return inner(hook_request)

        return answer()

    return respond


def _call(option: str, function: Function, *arguments: object) -> HookResponse:
    """Call a hook that returns a response. Raises GenerationError if it returns none."""
    returned = call(option, function, *arguments)
    try:
        with contained:
            return HookResponse(as_response(returned))
    except TypeError as error:
        raise GenerationError(f"option.{option}: {error}") from error
