# SPDX-License-Identifier: Apache-2.0
"""ckptfs.View: closed, forked, pickled; how steps and options are spelled; an open view given to load_state_dict."""

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time

from runner import run_in_folders

BUILD = os.path.abspath(os.environ.get("CKPTFS_BUILD", "build/release"))
HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.join(HERE, "..", "..", "contrib", "python")
LLAMA = os.path.join(HERE, "..", "golden", "nanotron", "llama_tp1_pp1_untied_interleaved")
MOE = os.path.join(HERE, "..", "golden", "nanotron", "qwen2_moe_epbranch_tp1_dp2_ep2")
NAME = "model.embed_tokens.weight"

try:
    import torch
    import transformers
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

os.environ["CKPTFS_LIBRARY_PATH"] = BUILD
sys.path.insert(0, PACKAGE)
import ckptfs  # noqa: E402
from ckptfs import _fork  # noqa: E402


def error_of(kind, fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except kind as e:
        return e
    raise AssertionError("no error")


def apart(script, **env):
    """A process of its own: it may crash."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PACKAGE, **env})
    return done.returncode, done.stdout, done.stderr


def a_closed_view_is_an_error(top):
    code, said, errors = apart(f"""
import ckptfs
with ckptfs.open({LLAMA!r}) as f:
    s = f.get_slice({NAME!r})
for use in (lambda: s[:2], s.get_shape, s.get_dtype, lambda: f.get_tensor({NAME!r}), lambda: f.get_slice({NAME!r}), f.keys, f.info, f.metadata,
            lambda: len(f), lambda: 'x' in f, lambda: ckptfs.load_state_dict({{}}, f), lambda: f.__reduce__()):
    try:
        use()
    except ckptfs.CkptError as e:
        assert e.code == 'usage' and 'closed' in str(e), e
    else:
        raise AssertionError('no error')
f.close()
assert 'closed' in repr(f)
print('good')""")
    assert (code, said) == (0, "good\n"), (code, errors)


def a_model_with_torchtitan_s_names_is_filled_too(top):
    with ckptfs.open(LLAMA, view="torchtitan") as f:
        want = {name: f.get_tensor(name) for name in f.keys()}
    assert "tok_embeddings.weight" in want, list(want)
    state = {name: torch.zeros_like(t) for name, t in want.items()}
    ckptfs.load_state_dict(state, LLAMA)
    assert all(torch.equal(state[name], t) for name, t in want.items())


def closing_while_others_read(top):
    """Readers get the tensor, or the error."""
    with ckptfs.open(LLAMA) as f:
        want = f.get_tensor(NAME)
    for _ in range(30):
        f, wrong = ckptfs.open(LLAMA), []

        def read():
            try:
                while True:
                    if not torch.equal(f.get_tensor(NAME), want):
                        wrong.append("bytes")
            except ckptfs.CkptError as e:
                wrong.extend([] if "closed" in str(e) else [e])
        threads = [threading.Thread(target=read) for _ in range(4)]
        for t in threads:
            t.start()
        f.close()
        for t in threads:
            t.join()
        assert not wrong, wrong


def forked(child):
    """What a forked child's function says: True is good."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if child() else 2
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def forked_children_read(top):
    """Also those that are forked while other threads read."""
    with ckptfs.open(LLAMA) as f:
        want, stop = f.get_tensor(NAME), threading.Event()

        def read():
            while not stop.is_set():
                f.get_tensor(NAME)
        threads = [threading.Thread(target=read) for _ in range(3)]
        for t in threads:
            t.start()
        try:
            assert all(forked(lambda: torch.equal(f.get_tensor(NAME), want)) for _ in range(40))
        finally:
            stop.set()
            for t in threads:
                t.join()


def a_fork_while_reads_never_pause(top):
    """It is not put off for as long as other threads read in turns; and a read within a read does not wait for it."""
    with ckptfs.open(LLAMA) as f:
        end = time.monotonic() + 6

        def read():
            while time.monotonic() < end:
                with _fork.reading(f):
                    time.sleep(0.01)
                    f.unchanged(f)
        threads = [threading.Thread(target=read) for _ in range(4)]
        for t in threads:
            t.start()
        begin = time.monotonic()
        good = all(forked(lambda: NAME in f.keys()) for _ in range(5))
        took, end = time.monotonic() - begin, 0
        for t in threads:
            t.join()
        assert good and took < 3, (good, took)


def forked_while_a_load_runs(top):
    """The child can't know what the load's threads were doing: an error, no hang."""
    with ckptfs.open(LLAMA) as f:
        state = {k: torch.zeros(f.get_slice(k).get_shape()) for k in f.keys()}
        seen = []

        def progress(done, of):
            if not seen:
                seen.append(forked(lambda: "forked while a load" in str(error_of(ckptfs.CkptError, f.get_tensor, NAME))))
        ckptfs.load_state_dict(state, f, progress=progress)
        assert seen == [True] and torch.equal(state[NAME], f.get_tensor(NAME).float())


def used_in_a_child(uses):
    """In a forked child each of these is an error that says so, at once: also where the child was forked while somebody held the object's locks."""
    def child():
        signal.alarm(20)  # a hang ends the child
        return all("forked" in str(error_of(ckptfs.CkptError, use)) for use in uses)
    return forked(child)


def loads_of_the_parent_in_a_forked_child(top):
    """What controls a load, before the load has begun, while it runs and after it; the parent's goes on."""
    with ckptfs.open(LLAMA) as f:
        state = {k: torch.zeros(f.get_slice(k).get_shape()) for k in f.keys()}
        want = f.get_tensor(NAME).float()
    gate = threading.Event()
    load = ckptfs.load_async(state, LLAMA, names=lambda name: gate.wait())
    asked = load.tensors()
    uses = (load.wait, lambda: load.wait(1), load.done, load.tensors, lambda: next(asked), load.pause, load.resume, load.cancel, lambda: load.progress)
    assert used_in_a_child(uses)
    with load._lock:
        assert used_in_a_child(uses)
    gate.set()
    next(asked)
    assert used_in_a_child(uses)
    load.wait()
    assert used_in_a_child(uses) and torch.equal(state[NAME], want) and len(list(asked)) == len(state) - 1


def comms_and_reloaders_of_the_parent_in_a_forked_child(top):
    """They are errors, and closing them closes nothing of the parent's."""
    with ckptfs.open(LLAMA) as f:
        state = {k: torch.zeros(f.get_slice(k).get_shape()) for k in f.keys()}
    with ckptfs.Comm() as comm, ckptfs.Reloader(state, LLAMA) as own, ckptfs.Reloader(state, LLAMA, comm) as shared:
        uses = (own.reload, shared.reload, lambda: ckptfs.load_state_dict(state, LLAMA, comm), lambda: ckptfs.Reloader(state, LLAMA, comm))

        def closed():
            signal.alarm(20)
            for each in (own, shared, comm):
                each.close()
            return True
        assert used_in_a_child(uses) and forked(closed)
        with own._changed, shared._changed, comm._idle:
            assert used_in_a_child(uses) and forked(closed)
        assert own.reload() and shared.reload()


def iterators_in_a_forked_child(top):
    """Begun by the parent, items() is an error there; of the child's own it reads."""
    with ckptfs.open(LLAMA) as f:
        rest = f.items()
        next(rest)
        assert used_in_a_child((lambda: next(rest),)) and forked(lambda: rest.close() is None)
        assert forked(lambda: len(list(f.items())) == len(f))
        assert len(list(rest)) == len(f) - 1


def without_the_library(top):
    """The import error, and nothing from __del__."""
    code, _, errors = apart("import ckptfs; ckptfs.open('/x')", CKPTFS_LIBRARY_PATH="/nowhere")
    assert code == 1 and errors.count("Traceback") == 1 and "/nowhere" in errors and "__del__" not in errors, errors
    code, said, errors = apart(f"import ckptfs; f = ckptfs.open({LLAMA!r}); print(len(f.keys()) > 9)")  # it is still open at the end
    assert (code, said, errors) == (0, "True\n", ""), errors


ADAPTERS = {"megatron": ("megatron/core", "megatron_core", "LoadShardedStrategy()"), "nanotron": ("nanotron", "nanotron", "load_weights(None, None, 'x')"),
            "accelerate": ("accelerate", "accelerate", "fsdp2_load_full_state_dict(None, None, 'x')"), "torch": ("torch", "torch", "StorageReader('x')"),
            "transformers": ("transformers", "transformers", "from_pretrained('x')"), "vllm": ("vllm", "vllm", "register()")}


def a_framework_that_lacks_a_part(top):
    """Its version is told, and what importing it said; not that it is to be installed."""
    for adapter, (folder, distribution, call) in ADAPTERS.items():
        for code, said in (("", None if adapter in ("accelerate", "transformers") else "import" if adapter == "megatron" else "No module named"),
                           ("import that_is_not_here", "No module named 'that_is_not_here'"), ("from os import such_a_thing", "such_a_thing")):
            here = os.path.join(top, adapter)
            shutil.rmtree(here, ignore_errors=True)
            os.makedirs(os.path.join(here, folder))
            os.makedirs(os.path.join(here, f"{distribution}-7.8.9.dist-info"))
            with open(os.path.join(here, f"{distribution}-7.8.9.dist-info", "METADATA"), "w", encoding="utf-8") as f:
                f.write(f"Metadata-Version: 2.1\nName: {distribution.replace('_', '-')}\nVersion: 7.8.9\n")
            with open(os.path.join(here, folder, "__init__.py"), "w", encoding="utf-8") as f:
                f.write(code)
            status, out, _ = apart(f"import ckptfs.{adapter} as m\ntry:\n m.{call}\nexcept ImportError as e:\n print(e)", PYTHONPATH=f"{here}:{PACKAGE}")
            assert said is None or (status == 0 and "7.8.9" in out and said in out and "pip install" not in out), (adapter, code, out)


def read_elsewhere(view):
    return view.get_tensor(NAME), repr(view)


def pickled(top):
    """Path, options and step travel; in a spawned process, and to another folder."""
    os.makedirs(top)
    for step in ("step-10", "step-20"):
        shutil.copytree(LLAMA + ".expected", os.path.join(top, step))
    here = os.getcwd()
    os.chdir(top)
    try:
        f = ckptfs.open(".", step=10, dtype="float32")
    finally:
        os.chdir(here)
    again = pickle.loads(pickle.dumps(f))
    assert again.keys() == f.keys() and again.get_slice(NAME).get_dtype() == "F32" and repr(again) == repr(f) and "step-10" in repr(f), repr(f)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        tensor, shown = pool.apply(read_elsewhere, (f,))
    assert torch.equal(tensor, f.get_tensor(NAME)) and shown == repr(f)
    data = pickle.dumps(f)
    os.utime(os.path.join(top, "step-10", "model.safetensors"), ns=(1, 1))
    assert error_of(ckptfs.CkptError, pickle.loads, data).code == "stale"


def steps(top):
    """By name and by number, as the tool's --step; in load_state_dict, too."""
    os.makedirs(top)
    for step in ("step-10", "step-0200", "other-7", "more-7"):
        shutil.copytree(LLAMA + ".expected", os.path.join(top, step))
    for step, name in ((10, "step-10"), ("10", "step-10"), ("step-10", "step-10"), (200, "step-0200")):
        with ckptfs.open(top, step=step) as f:
            assert f"'{name}'" in repr(f), repr(f)
    assert error_of(ckptfs.CkptError, ckptfs.open, top, step=11).code == "missing"
    assert error_of(ckptfs.CkptError, ckptfs.open, top, step=7).code == "conflict"
    assert error_of(ckptfs.CkptError, ckptfs.open, LLAMA + ".expected", step=1).code == "usage"
    with ckptfs.open(top, step=10) as f:
        state = {k: torch.empty(f.get_slice(k).get_shape(), device="meta") for k in f.keys()}
    ckptfs.load_state_dict(state, top, step=10)
    assert not state[NAME].is_meta


def spellings(top):
    """Options are keywords or a dict, for open and load_state_dict alike; an open view has its own."""
    for given in ({"dtype": "float32"}, {"options": {"dtype": "float32"}}):
        with ckptfs.open(LLAMA, **given) as f:
            assert f.get_slice(NAME).get_dtype() == "F32"
        with ckptfs.open(LLAMA) as f:
            state = {k: torch.zeros(f.get_slice(k).get_shape()) for k in f.keys()}
        ckptfs.load_state_dict(state, LLAMA, **given)
    error_of(ValueError, ckptfs.open, LLAMA, dtype="float32", options={"dtype": "float32"})
    error_of(ckptfs.CkptError, ckptfs.open, LLAMA, speed="high")
    error_of(ckptfs.CkptError, ckptfs.load_state_dict, state, LLAMA, speed="high")
    for framework in ("tf", "jax", "flax", None):
        assert "framework" in str(error_of(ValueError, ckptfs.open, LLAMA, framework=framework))
    with ckptfs.open(LLAMA) as f:
        for given in ({"base": LLAMA}, {"step": 3}, {"view": "raw"}, {"view": "hf"}, {"options": {"dtype": "float32"}}, {"dtype": "float32"}):
            said = str(error_of(ValueError, ckptfs.load_state_dict, state, f, **given))
            assert "open View" in said and (set(given) | {"dtype"}) & set(said.replace("=", " ").split()), said


def an_open_view_of_fused_experts(top):
    """The hub's names of experts, where the model's class stacks them: the names in memory are used."""
    expected = MOE + ".expected"
    config = transformers.AutoConfig.from_pretrained(expected)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with ckptfs.open(MOE) as f:
        result = ckptfs.load_state_dict(model, f)
        assert not result.missing_keys and not result.unexpected_keys
        assert f.get_tensor(NAME) is not None
    want = transformers.AutoModelForCausalLM.from_pretrained(expected, dtype=torch.float32).state_dict()
    assert all(torch.equal(t, want[k]) for k, t in model.state_dict().items())


def indices_that_mean_something_else_elsewhere(top):
    """torch and numpy take truth values as masks and pair lists: no index of a slice, which safetensors' is neither."""
    with ckptfs.open(LLAMA) as f:
        s = f.get_slice(NAME)
        for index in (True, [True, False], None, (slice(None), [False]), ([0, 1], [1, 2])):
            assert "slice" in str(error_of(TypeError, lambda: s[index])), index
        assert "null byte" in str(error_of(ValueError, lambda: ckptfs.open(LLAMA + "\0x")))
        assert error_of(ckptfs.CkptError, lambda: f.read("config.json\0x")).code == "missing"


def pieces_for_another_device(top):
    """What is read for another device than the CPU comes in pieces, and is the same; none has more bytes than it may."""
    from ckptfs import _view
    with ckptfs.open(LLAMA) as view, ckptfs.open(LLAMA, device="cpu:0") as other:
        for _view.PIECE in (2, 60, 64, 4000, 1 << 20):
            for name in view.keys()[:: 1 if _view.PIECE > 100 else 5]:
                assert torch.equal(view[name], other[name]), (name, _view.PIECE)
            rows = view.get_slice(NAME)[3:50, 5:21]
            assert torch.equal(rows, other.get_slice(NAME)[3:50, 5:21])
            assert all(part.numel() * 2 <= _view.PIECE for _, _, part in _view._pieces(rows, _view.PIECE))
            assert other.get_slice(NAME)[3:3].shape == view.get_slice(NAME)[3:3].shape


def version(top):
    with open(os.path.join(PACKAGE, "..", "..", "CMakeLists.txt"), encoding="utf-8") as f:
        assert f"project(ckptfs VERSION {ckptfs.__version__} " in f.read()
    os.makedirs(top)  # a library of another version, of which no other function is called
    with open(os.path.join(top, "other.c"), "w", encoding="utf-8") as f:
        f.write('const char *ckpt_version(void) { return "0.1.9"; }')
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", os.path.join(top, "libckptfs_load.so.0"), os.path.join(top, "other.c")], check=True)
    code, _, errors = apart("import ckptfs; ckptfs.open('/x')", CKPTFS_LIBRARY_PATH=top)
    assert code == 1 and "version 0.1.9" in errors and ckptfs.__version__ in errors and "ImportError" in errors, errors


if __name__ == "__main__":
    run_in_folders((a_closed_view_is_an_error, closing_while_others_read, forked_children_read, a_fork_while_reads_never_pause, forked_while_a_load_runs, loads_of_the_parent_in_a_forked_child,
                    comms_and_reloaders_of_the_parent_in_a_forked_child, iterators_in_a_forked_child, without_the_library, a_framework_that_lacks_a_part,
                    pickled, steps, spellings, a_model_with_torchtitan_s_names_is_filled_too, an_open_view_of_fused_experts, indices_that_mean_something_else_elsewhere,
                    pieces_for_another_device, version))
