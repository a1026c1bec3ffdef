"""The children of a block in the tree of prefixes, as little memory as they take: most blocks have one, some thousands."""

from typing import Final

from kvstore.tiers.policies.interface import K

FEW_CHILDREN: Final = 4
"""Up to so many are a tuple, more of them a set."""

Children = tuple[K, ...] | set[K]


def with_child(children: Children[K], key: K) -> Children[K]:
    """The children and one more: a prefix that many share has thousands."""
    if isinstance(children, set):
        children.add(key)
        return children
    return (*children, key) if len(children) < FEW_CHILDREN else {*children, key}


def without_child(children: Children[K], key: K) -> Children[K]:
    """The others; a set is changed."""
    if isinstance(children, set):
        children.discard(key)
        return children or ()
    return tuple(child for child in children if child != key)
