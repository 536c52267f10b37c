# SPDX-License-Identifier: Apache-2.0
"""One load of one rank: what it wants, where that goes, and waiting for it."""

import contextlib
import ctypes
import sys
from ctypes import byref, c_size_t

from . import _overlap
from ._comm import IDLE_S, share_number
from ._fork import loading
from ._library import (
    PUT,
    READERS,
    CkptError,
    Dest,
    LoadOptions,
    Mesh,
    Place,
    Stats,
    WantInfo,
    library,
    new,
    u32s,
    u64s,
)
from ._tensors import (
    SAFETENSORS,
    is_dtensor,
    is_sharded_tensor,
    is_strided,
    loses,
    places,
    same_bits,
    written,
)
from ._view import torch_dtype

CASTABLE = {"F16", "BF16", "F32", "F64"}
TICK_MS = 200  # how often Python looks for signals (Ctrl-C)


def make_options(readers, options):
    """Return struct ckpt_load_options; ValueError for a wrong option."""
    if readers not in READERS:
        raise ValueError(f"readers={readers!r}: expected one of {', '.join(READERS)}")
    opt = LoadOptions(readers=READERS[readers])
    opt.share_with, opt.idle_s = None, IDLE_S
    known = {name for name, _ in LoadOptions._fields_} - {"size", "readers", "share"}
    for key, value in (options or {}).items():
        if key == "rates":
            if not isinstance(value, dict):
                raise ValueError(f"load_options: rates={value!r}: expected a dict")
            for rate, n in value.items():
                if not hasattr(opt.rates, rate):
                    raise ValueError(f"load_options: there is no rate {rate!r}")
                if not (isinstance(n, (int, float)) and n >= 0):
                    raise ValueError(f"load_options: rate {rate}={n!r}: expected bytes per second")
                setattr(opt.rates, rate, n)
        elif key == "share_with":
            opt.share_with = value
        elif key == "idle_s":
            if value is not None and not (isinstance(value, (int, float)) and value >= 0):
                raise ValueError(f"load_options: idle_s={value!r}: expected seconds, or None")
            opt.idle_s = value
        elif key not in known:
            raise ValueError(f"load_options: there is no {key!r}")
        else:
            try:
                setattr(opt, key, value)
            except TypeError as e:
                raise ValueError(f"load_options: {key}={value!r}: {e}") from None
            if getattr(opt, key) != value:
                raise ValueError(f"load_options: {key}={value!r} is out of range")
    return opt


class Load:
    """The wants of one load."""

    def __init__(self, view, comm, options):
        import torch

        self.view, self.comm = view, comm
        self.device = (
            torch.device("cpu") if comm.device is None else torch.device("cuda", comm.device)
        )
        self.keep = []  # what C holds pointers into
        self.puts = []  # what is to be done after the load: [(entry, local tensor that it gets)]
        self.direct = []  # tensors that C writes to
        self.wants = []  # [(entry, its local tensor)]
        self.copied = {}  # {CUDA device to which torch copies: an event of the caller's stream}
        self.why = None  # the error with which such a copy has failed
        self.filled = {}  # {entry: its local tensors}
        self.memory = []  # [_overlap.Place] of those
        self.compares = False  # some rank has copies
        self.kept = False  # its owner closes it
        comm.after_stream()
        options.share = share_number(comm, options.share_with)
        self.load = new(library().load_new, view._view, comm.handle, byref(options))
        comm.add(self)

    def close(self):
        load, self.load = self.load, None
        if load:
            library().load_free(load)

    def cancel(self):
        library().load_cancel(self.load)

    def resume(self):
        self.comm.after_stream()
        library().load_resume(self.load)

    def _destination(self, tensor, stored, entry):
        """Return a Dest for a local tensor of an entry.

        It is the tensor's memory where C can write it, on the load's device or on the host, else a
        function that lets torch copy each part as it arrives. A tensor on the meta device gets
        memory. Values that are stored as float8_e4m3fn keep that dtype where the entry may change
        its own, because they mean nothing without their scales.
        """
        import torch

        if not is_strided(tensor):
            raise CkptError(
                "unsupported",
                f"'{entry.name}' is a {type(tensor).__name__} ({tensor.layout}) without memory of "
                "its own that could be filled",
            )
        if loses(stored, tensor.dtype):
            raise CkptError(
                "conflict",
                f"'{entry.name}' is {stored} in the checkpoint, which can't be copied to "
                f"{tensor.dtype}",
            )
        wanted = SAFETENSORS.get(str(entry.dtype_of(tensor)).removeprefix("torch."))
        castable = stored in CASTABLE and wanted in CASTABLE
        alone = (
            stored == "F8_E4M3" and wanted != stored and tensor.is_floating_point() and entry.retype
        )
        if tensor.is_meta or alone:
            wanted = stored if alone else wanted
            tensor = torch.empty_like(
                tensor,
                dtype=torch_dtype(wanted),
                device=entry.home(),
                requires_grad=False,
            )
            self.puts.append((entry, tensor))
        self.comm.check_place(tensor.device)
        direct = tensor.device in (self.device, torch.device("cpu"))
        direct = direct and (stored == wanted or castable)
        direct = direct and not tensor.is_neg() and not tensor.is_conj()
        self.wants.append((entry, tensor))
        self.filled.setdefault(entry, []).append(tensor)
        dtype = wanted if castable else stored
        dest = Dest(None, None, dtype.encode())
        if direct:
            self.direct.append(tensor)
            dest.ptr, dest.stride = tensor.data_ptr(), u64s(list(tensor.stride()))
            dest.host = tensor.device != self.device
        else:
            dest.put = self._putting(tensor)
        self.keep.append((tensor, dest))
        return dest

    def _putting(self, tensor):
        """Return a function that copies a part into a tensor; threads of C call it."""
        import torch

        if tensor.device.type == "cuda":
            self.copied[tensor.device] = None

        def put(_, lo, n, data, stride, dtype):
            try:
                rank = tensor.dim()
                lo, n, stride = lo[:rank], n[:rank], stride[:rank]
                kind = torch_dtype(dtype.decode())
                span = 1 + sum((m - 1) * s for m, s in zip(n, stride))
                memory = (ctypes.c_char * (span * kind.itemsize)).from_address(data)
                part = torch.frombuffer(memory, dtype=kind).as_strided(n, stride)
                with torch.no_grad():
                    self._copy(tensor[tuple(slice(a, a + m) for a, m in zip(lo, n))], part)
            except Exception as e:
                self.why = self.why or e
                return -1
            return 0

        return PUT(put)

    def _copy(self, to, part):
        """Copy a part, after what the caller had queued for its device."""
        import torch

        if to.device.type != "cuda":
            to.copy_(part)
            return
        stream = torch.cuda.current_stream(to.device)  # of this thread
        stream.wait_event(self.copied[to.device])
        to.copy_(part)
        stream.synchronize()

    def _remember(self, entry, source, lo):
        """Note the memory that _destination() has just given to an entry."""
        tensor = self.filled[entry][-1]
        if tensor.numel():
            self.memory.append(_overlap.Place(entry.name, tensor, source, lo))

    def check_memory(self):
        """Check that no element is filled twice: the later value would stay."""
        _overlap.check(self.memory)
        self.memory = []

    def want_box(self, source, lo, n, tensor, entry):
        """Want elements [lo, lo + n) of the view's `source`, in a local tensor of shape n."""
        dest = self._destination(tensor, self.view._tensors[source].dtype, entry)
        self._remember(entry, source, lo)
        library().load_want(
            self.load, source.encode(), u64s(lo), u64s(n), byref(dest), byref(c_size_t())
        )

    def want(self, entry, source):
        """Want the view's `source` for an entry's tensor, which as a whole has the same shape."""
        tensor = entry.tensor
        if is_dtensor(tensor):
            self._want_dtensor(entry, source)
        elif is_sharded_tensor(tensor):
            for shard in tensor.local_shards():
                self.want_box(
                    source,
                    shard.metadata.shard_offsets,
                    shard.metadata.shard_sizes,
                    shard.tensor,
                    entry,
                )
        else:
            self.want_box(source, [0] * tensor.dim(), list(tensor.shape), tensor, entry)

    def _want_dtensor(self, entry, source):
        tensor, name = entry.tensor, entry.name
        lib, local, number, got = library(), tensor._local_tensor, c_size_t(), WantInfo()
        if tensor.device_mesh.get_coordinate() is None:  # of other ranks
            return
        order, kinds = places(tensor)
        try:
            dims, ranks = self.comm.mesh(tensor.device_mesh, order)
        except KeyError as e:
            raise CkptError(
                "usage", f"'{name}': rank {e} of its mesh is not in the process group"
            ) from None
        mesh = Mesh(len(dims), u32s(dims), u32s(ranks))
        place = (Place * max(len(kinds), 1))(*[Place(k, d) for k, d in kinds])
        dest = self._destination(local, self.view._tensors[source].dtype, entry)
        lib.load_want_part(
            self.load, source.encode(), None, None, byref(mesh), place, byref(dest), byref(number)
        )
        lib.load_want_info(self.load, number, byref(got))
        self._remember(entry, source, got.lo)
        have, part = list(local.shape), list(got.n[: got.rank])
        if part != have and local.numel():
            raise CkptError("unsupported", f"'{name}': torch holds {have} of it here, not {part}")

    def want_layout(self, layout):
        """Want everything that this rank has of the model under a layout.

        Returns {name: (tensor, [(offset, shape)])}. Boxes of one tensor, as fused ones have them,
        are joined along the dimension in which they are divided.
        """
        lib, boxes = library(), {}
        lib.load_want_layout(self.load, layout.encode())
        for number in range(lib.load_wants(self.load)):
            info = WantInfo()
            lib.load_want_info(self.load, number, byref(info))
            box = list(info.lo[: info.rank]), list(info.n[: info.rank])
            boxes.setdefault(info.tensor.decode(), []).append((number, *box))
        return {
            name: (self._joined(name, parts), [(lo, n) for _, lo, n in parts])
            for name, parts in boxes.items()
        }

    def _joined(self, name, parts):
        import torch

        dim = _joint(name, parts)
        shape = list(parts[0][2])
        if len(parts) > 1:
            shape[dim] = sum(n[dim] for _, _, n in parts)
        dtype = torch_dtype(self.view._tensors[name].dtype)
        whole, at = torch.empty(shape, dtype=dtype, device=self.device), 0
        for number, _, n in parts:
            to = whole.narrow(dim, at, n[dim]) if len(parts) > 1 else whole
            at += n[dim] if n else 0
            dest = Dest(to.data_ptr(), u64s(list(to.stride())), None)
            self.keep.append((to, dest))
            library().load_set_dest(self.load, number, byref(dest))
        return whole

    def run(self, progress):
        """Load, and return the statistics of all ranks together."""
        library().load_plan(self.load)
        return self._run(progress)

    def rerun(self, view, progress, changed_only=False):
        """Load the same tensors of another view into the same memory."""
        self.comm.after_stream()
        library().load_reload(self.load, view._view, changed_only)
        self.view = view
        return self._run(progress)

    def _run(self, progress):
        import torch

        lib = library()
        self.why = None
        for device in self.copied:
            self.copied[device] = torch.cuda.current_stream(device).record_event()
        lib.load_start(self.load)
        bar = _bar(progress if callable(progress) or self.comm.rank == 0 else None, len(self.keep))
        watch = progress if isinstance(progress, Watch) else None
        try:
            self.comm.runs(self)
            if watch is not None:
                watch.started(self)
            if bar is not None:
                self._watch(bar, watch)
            while lib.load_wait(self.load, TICK_MS) == 1:
                pass
        except CkptError as e:
            raise e from self.why
        finally:
            self.comm.runs(None)
            if watch is not None:
                watch.stopped()
            elif hasattr(bar, "close"):
                bar.close()
            with torch.no_grad():
                for tensor in self.direct:  # also if the load has failed
                    written(tensor)
        with torch.no_grad():
            self._agree(self._difference())
            for entry, tensor in self.puts:
                entry.put(tensor)
            self.puts = []  # they are there now
        stats = Stats()
        lib.load_stats(self.load, None, byref(stats))
        return stats.as_dict()

    def _difference(self):
        """Return an error if the values under several names of one tensor differ."""
        differ = [
            entry
            for entry, tensors in self.filled.items()
            if entry.of is not None and not all(map(same_bits, tensors, self.filled[entry.of]))
        ]
        names = ", ".join(f"'{entry.name}' and '{entry.of.name}'" for entry in differ)
        return (
            CkptError(
                "conflict",
                f"{names}: they are one tensor in what is to be filled, but the checkpoint has "
                "other values for each; untie them (tie_word_embeddings=False), or say with names= "
                "which to fill",
            )
            if differ
            else None
        )

    def _agree(self, failure):
        """Raise a failure; on all ranks, where they wait for each other's comparisons."""
        if self.compares:
            self.comm.agree(failure)
        elif failure is not None:
            raise failure

    def _watch(self, bar, watch):
        done, number = 0, c_size_t()
        bar(0, len(self.keep))
        while (rc := library().load_next(self.load, TICK_MS, byref(number))) != 2:
            if rc == 0:
                done += 1
                bar(done, len(self.keep))
                if watch is not None:
                    watch.arrived(*self.wants[number.value])


class Watch:
    """An observer of a load: a function for progress, called with (arrived, all), and hooks."""

    def __call__(self, done, of):
        pass

    def started(self, load):
        """Called when the load runs: from now on it may be cancelled."""

    def arrived(self, entry, tensor):
        """Called when a part of an entry's tensor has arrived.

        `tensor` is the memory where it stays.
        """

    def stopped(self):
        """Called when the load has ended: the Load is not to be used any more."""


def _joint(name, parts):
    """Return the dimension in which the boxes of one tensor are divided."""
    _, lo, n = parts[0]
    apart = {d for _, other, _ in parts for d in range(len(lo)) if other[d] != lo[d]}
    if len(apart) > 1 or any(
        m[d] != n[d] for _, _, m in parts for d in range(len(n)) if d not in apart
    ):
        raise CkptError(
            "unsupported",
            f"'{name}': this layout divides it in {sorted(apart)}, in boxes that do not join: "
            f"{parts}",
        )
    return apart.pop() if apart else 0


def run_together(comm, open_view, declare, options, progress):
    """Do one load on all ranks: declare(load) wants what this rank needs of open_view().

    If a rank fails before the load, all ranks raise its error.
    """
    load = failure = None
    with contextlib.ExitStack() as stack:
        try:
            view = open_view()
            stack.enter_context(loading(view))
            load = Load(view, comm, options)
            stack.callback(lambda: None if load.kept and failure is None else load.close())
            declare(load)
            load.check_memory()
        except Exception as e:
            failure = e
        comm.agree(failure)
        return load.run(progress)


def _bar(progress, total):
    if not progress:
        return None
    if callable(progress):
        return progress
    try:
        from tqdm import tqdm
    except ImportError:

        def show(done, of):
            print(
                f"\rckptfs: {done}/{of} tensors",
                end="\n" if done == of else "",
                file=sys.stderr,
                flush=True,
            )

        return show
    bar = tqdm(total=total, unit="tensor", desc="ckptfs")

    def update(done, of):
        bar.update(done - bar.n)

    update.close = bar.close
    return update
