# SPDX-License-Identifier: Apache-2.0
"""Whether tensors that are to be filled share memory."""

from ._library import CkptError

STEPS = 20000  # of one search; strides that need more are taken for overlapping ones


class Place:
    """Where elements of the view's tensor `source`, from `lo` on, are written: `tensor`."""

    def __init__(self, name, tensor, source, lo):
        self.name, self.source = name, source
        self.device, self.dtype = str(tensor.device), tensor.dtype
        self.item, self.start = tensor.element_size(), tensor.data_ptr()
        # (stride in bytes, number of elements)
        self.dims = [(s * self.item, n) for s, n in zip(tensor.stride(), tensor.shape)]
        self.end = self.start + sum(s * (n - 1) for s, n in self.dims) + self.item
        # Where element 0 of the source would be.
        self.origin = self.start - sum(s * at for (s, _), at in zip(self.dims, lo))
        self._check_storage(tensor)

    def _check_storage(self, tensor):
        storage = tensor.untyped_storage()
        has, needs = storage.nbytes(), self.end - self.start + tensor.storage_offset() * self.item
        if has < needs:
            raise CkptError(
                "usage",
                f"'{self.name}' needs {needs} bytes of its storage, which has {has}: was it "
                "resized to free memory?",
            )

    def overlaps_itself(self):
        """Return whether two elements are in one place."""
        dims = sorted(((s, 1 - n, n - 1) for s, n in self.dims if n > 1), reverse=True)
        return any(
            _meets([(s, 1, most), *dims[i + 1 :]], 0, self.item - 1, self.item - 1)
            for i, (s, _, most) in enumerate(dims)
        )

    def is_same(self, other):
        """Return whether both places get the same values for the bytes that they share."""
        mine, theirs = ([s for s, n in p.dims] for p in (self, other))
        return (self.source, self.origin, self.dtype, mine) == (
            other.source,
            other.origin,
            other.dtype,
            theirs,
        )

    def overlaps(self, other):
        """Return whether the places share a byte."""
        reach = {}
        for s, n in other.dims:
            reach[s] = (reach.get(s, (0, 0))[0], reach.get(s, (0, 0))[1] + n - 1)
        for s, n in self.dims:
            reach[s] = (reach.get(s, (0, 0))[0] - (n - 1), reach.get(s, (0, 0))[1])
        dims = sorted(((s, lo, hi) for s, (lo, hi) in reach.items() if lo or hi), reverse=True)
        return _meets(dims, other.start - self.start, other.item - 1, self.item - 1)


def check(places):
    """Raise CkptError if filling one of these places would change another one, or itself."""
    active = []
    for place in sorted(places, key=lambda p: (p.device, p.start)):
        if place.overlaps_itself():
            raise CkptError(
                "usage",
                f"'{place.name}' has several elements in one place of memory, as expanded tensors "
                "have: give it memory of its own (clone())",
            )
        active = [p for p in active if p.end > place.start and p.device == place.device]
        for other in active:
            if not place.is_same(other) and place.overlaps(other):
                raise CkptError(
                    "conflict",
                    f"'{other.name}' and '{place.name}' share a part of their memory, but have "
                    "values of their own in the checkpoint: give one of them other memory "
                    "(clone()), or leave it out",
                )
        active.append(place)


def _meets(dims, at, below, above):
    """Return whether a sum of multiples of strides comes close to -at.

    `dims` is [(stride, least, most)], the largest stride first. Is there an integer in [least,
    most] for each dimension, so that `at` plus the sum of stride times integer is in [-below,
    above]?
    """
    rest = [(0, 0)]
    for s, lo, hi in reversed(dims):
        rest.append((rest[-1][0] + s * lo, rest[-1][1] + s * hi))
    rest.reverse()  # of dims[i:]: the least and the largest sum
    todo, steps = [(0, at)] if -below - rest[0][1] <= at <= above - rest[0][0] else [], 0
    while todo:
        i, at = todo.pop()
        steps += 1
        if i == len(dims) or steps > STEPS or len(todo) > STEPS:
            return True
        todo += [(i + 1, x) for x in _next(at, dims[i], rest[i + 1], below, above)]
    return False


def _next(at, dim, rest, below, above):
    """Return the sums after one more dimension from which [-below, above] can still be reached."""
    stride, least, most = dim
    if stride:
        least = max(least, -((below + at + rest[1]) // stride))
        most = min(most, (above - at - rest[0]) // stride)
    elif at + rest[0] > above or at + rest[1] < -below:
        return []
    else:
        most = least
    return [at + stride * v for v in range(least, min(most, least + STEPS) + 1)]
