"""Any tree that an environment may hold comes back into another instance, shared as it was, and apart from the first.

The oracle is a deep copy made before the capture, compared by types and bits.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from typing import Any

import gymnasium
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from casckpt.integrations.gymnasium import EnvState


class Thing:
    """A plain object on the way."""

    def __init__(self, value: Any) -> None:
        self.value = value


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from([np.float32(0.1), np.int8(-3), np.bool_(True), np.datetime64(5, "D"), np.dtype("<f4")])
)
KEYS = st.integers() | st.text(max_size=3) | st.tuples(st.integers(), st.text(max_size=2))


@st.composite
def arrays(draw: Any) -> Any:
    dtype = draw(st.sampled_from(["f4", "i8", "u1", "?", "c8", ">i2"]))
    shape = draw(st.sampled_from([(), (0,), (3,), (2, 3)]))
    made = np.arange(int(np.prod(shape)), dtype="i8").reshape(shape).astype(dtype)
    return made.T if draw(st.booleans()) else made


LEAVES = SCALARS | arrays() | st.integers(0, 5).map(np.random.default_rng)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=4))
        | st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict)
        | st.sets(KEYS, max_size=3)
        | inner.map(Thing)
    ),
    max_leaves=12,
)


class Bag(gymnasium.Env[Any, Any]):
    """An environment that holds what it is given."""


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, np.random.Generator):
        return isinstance(b, np.random.Generator) and a.bit_generator.state == b.bit_generator.state
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(alike, a.values(), b.values()))
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, Thing):
        return alike(a.value, b.value)
    return bool(a == b) if isinstance(a, (set, frozenset)) else repr(a) == repr(b)


def things_in(tree: Any) -> Any:
    """The same tree with fresh things at the places of things, as another constructor call would make them."""
    if isinstance(tree, Thing):
        return Thing(things_in(tree.value))
    if isinstance(tree, dict):
        return {key: things_in(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple, deque)):
        return type(tree)(things_in(item) for item in tree)
    return 0


@given(TREES, TREES)
def test_whatever_an_environment_holds_comes_back_apart_from_the_first(one: Any, two: Any) -> None:
    env, other = Bag(), Bag()
    env.one, env.two, env.again = one, two, one
    other.one, other.two = things_in(one), things_in(two)
    other.again = other.one
    expected = copy.deepcopy(vars(env))
    state = EnvState(env).state_dict()
    EnvState(other).load_state_dict(state)
    assert alike(vars(other), expected)
    if not isinstance(one, tuple) and isinstance(one, (list, dict, deque, Thing, np.ndarray, np.random.Generator)):
        assert other.again is other.one
        assert other.one is not one
    spoil(env.one)
    spoil(env.two)
    assert alike(vars(other), expected)
    spoil(other.one)
    EnvState(other).load_state_dict(state)
    assert alike(vars(other), expected)


def spoil(tree: Any) -> None:
    """Change whatever can change, but for the objects on the way."""
    if isinstance(tree, Thing):
        spoil(tree.value)
    elif isinstance(tree, np.ndarray):
        tree[...] = 1
    elif isinstance(tree, np.random.Generator):
        tree.random()
    elif isinstance(tree, dict):
        for value in tree.values():
            spoil(value)
    elif isinstance(tree, (list, tuple, deque)):
        for value in tree:
            spoil(value)
