"""A suffix automaton: every run of tokens of a text, in a number of states that grows linearly.

Blumer et al., 1985. A state stands for runs that end at the same places of the text. Appending a
token takes constant time on average.
"""

from __future__ import annotations

from array import array

NONE = -1


class SuffixAutomaton:
    """The automaton of a text that grows. Tokens are not negative, but see `SEPARATOR`."""

    SEPARATOR = -2
    """Ends a text of several that are appended to one another: nothing is proposed across it.

    A run that another token has followed is proposed to go on with that one."""

    def __init__(self) -> None:
        self._lengths = array("i", [0])
        """Of the longest run of each state."""
        self._links = array("i", [NONE])
        """The state of the longest suffix that also occurs elsewhere."""
        self._tokens = array("i", [NONE])
        """The token that last followed the runs of each state."""
        self._targets = array("i", [NONE])
        """The state after that token."""
        self._others: dict[int, dict[int, int]] = {}
        """States after other tokens. Most states have none."""
        self._last = 0

    def __len__(self) -> int:
        """Return the number of states: up to two for each token."""
        return len(self._lengths)

    @property
    def repeated(self) -> tuple[int, int]:
        """The state of the longest suffix of the text that occurs earlier, and its length."""
        state = max(0, self._links[self._last])
        return state, self._lengths[state]

    def append(self, token: int) -> None:
        new = self._add(self._lengths[self._last] + 1, link=0)
        state, self._last = self._last, new
        target = NONE
        while state != NONE and (target := self._next(state, token)) == NONE:
            self._set(state, token, new)
            state = self._links[state]
        if state == NONE:
            return
        if self._lengths[target] != self._lengths[state] + 1:
            target = self._split(state, token, target)
        self._links[new] = target
        self._set(state, token, target)

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state and the length of the longest run that a token makes of another run.

        `length` tokens, which the state stands for, come before the token.
        """
        while (target := self._next(state, token)) == NONE:
            state = self._links[state]
            if state == NONE:
                return 0, 0
            length = self._lengths[state]
        return target, length + 1

    def follow(self, state: int, count: int) -> tuple[int, ...]:
        """Return up to `count` tokens: those that last followed each run, from `state` on."""
        followers: list[int] = []
        while len(followers) < count:
            while state > 0 and self._tokens[state] == NONE:
                state = self._links[state]  # the end of the text: it may go on as it did before
            token = self._tokens[state]
            if state <= 0 or token == self.SEPARATOR:
                break
            followers.append(token)
            state = self._targets[state]
        return tuple(followers)

    def _add(self, length: int, link: int) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._tokens.append(NONE)
        self._targets.append(NONE)
        return len(self._lengths) - 1

    def _split(self, state: int, token: int, target: int) -> int:
        """Return a new state for the runs of `target` that are as short as those of `state`."""
        clone = self._add(self._lengths[state] + 1, self._links[target])
        self._tokens[clone], self._targets[clone] = self._tokens[target], self._targets[target]
        if target in self._others:
            self._others[clone] = dict(self._others[target])
        self._links[target] = clone
        while state != NONE and self._next(state, token) == target:
            if self._tokens[state] == token:
                self._targets[state] = clone
            else:
                self._others[state][token] = clone
            state = self._links[state]
        return clone

    def _next(self, state: int, token: int) -> int:
        if self._tokens[state] == token:
            return self._targets[state]
        others = self._others.get(state)
        return NONE if others is None else others.get(token, NONE)

    def _set(self, state: int, token: int, target: int) -> None:
        """Set the state after a token, which now is the last that followed. Separators are not."""
        before = self._tokens[state]
        if token == self.SEPARATOR and before != NONE:
            self._others.setdefault(state, {})[token] = target
            return
        if before not in (NONE, token):
            others = self._others.setdefault(state, {})
            others.pop(token, None)
            others[before] = self._targets[state]
        self._tokens[state], self._targets[state] = token, target
