"""
Measure the models against each other, a table per subcommand:

    python bench.py                                    KV cache and decode speed, in about two minutes
    python bench.py --block_size 512 2048 --compile    ... at two contexts, with a compiled decode step
    python bench.py train                              time and memory of a training step
    python bench.py loss RUN [RUN ...]                 losses of runs of train.py, the first one being the baseline
    python bench.py attention RUN [RUN ...]            how attention concentrates in each of their layers
    python bench.py train --help                       all settings of a table

The first two need no checkpoint and no data: the weights are random, since neither memory nor speed depends on them.
"""

import csv
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from model import GPT, LAMBDA_MODES, GPTConfig, KVCache, store_by_columns
from prepare_data import Parser, load_dataset, replacing, run
from train import (
    LOG_COLUMNS, Settings, boolean, compile_model, load_checkpoint, peak_memory, pick_device, pick_dtype, step_tools,
    train_step, windows,
)  # fmt: skip

MODELS = {  # flags of GPTConfig; GQA has a quarter of the heads, CLA (kv_share) two layers per K and V
    "Transformer": {},
    "ResFormer": {"value_residual": True},
    "SVFormer": {"shared_value": True},
    "GQA": {"gqa": True},
    "SVFormer + GQA": {"shared_value": True, "gqa": True},
    "CLA": {"kv_share": 2},
    "SVFormer + CLA": {"shared_value": True, "kv_share": 2},
    "SVFormer + GQA + CLA": {"shared_value": True, "gqa": True, "kv_share": 2},
}


def model_config(name, size, block_size):
    """The GPTConfig of MODELS[name] at a size of the paper. ValueError for an unknown size."""
    flags = dict(MODELS[name])
    config = GPTConfig.paper(size, block_size=block_size)
    n_kv_head = max(1, config.n_head // 4) if flags.pop("gqa", False) else None
    return GPTConfig.paper(size, block_size=block_size, n_kv_head=n_kv_head, **flags)


def cache_units(config):
    """
    How many K and V the paper counts per token (arXiv 2410.17897, and 2405.12981 for CLA), in heads: with N layers in
    groups of c, ceil(N / c) K and as many V, or a single V in the SVFormer, each of n_kv_head heads.
    """
    groups = -(-config.n_layer // config.kv_share)
    return (groups + (1 if config.shared_value else groups)) * config.kv_heads


def cache_ratio(config):
    """The KV cache as a share of that of a Transformer with this many layers and heads, by the paper's count."""
    return cache_units(config) / (2 * config.n_layer * config.n_head)


def decode_bytes(config, n_params, batch_size, past, itemsize):
    """
    Bytes that one decode step behind `past` tokens cannot avoid to move, with `itemsize` bytes per number: each weight
    once (but one row per sequence of the embedding), the cached K and V once, and the new token's K and V.
    """
    weights = n_params - (config.vocab_size - batch_size) * config.n_embd
    return (weights + batch_size * (past + 1) * cache_units(config) * config.head_dim) * itemsize


def sequences_that_fit(budget, weights, cache):
    """How many sequences, each with `cache` bytes of K and V, fit into `budget` bytes beside `weights` bytes."""
    return max(0, int((budget - weights) // cache))


class StaticCache(KVCache):
    """A KVCache for `static_step`, whose shapes must be the same at every length, as CUDA graphs need."""

    def __init__(self, config, batch_size, max_len, device=None, dtype=None):
        super().__init__(config, batch_size, max_len, device, dtype)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        for buffer in (*self.k, *self.v, self.position):
            torch._dynamo.mark_static_address(buffer)  # a CUDA graph then works on the buffer, not on a copy

    def append(self, buffer, new):
        """Like KVCache.append, but a single token goes to `position` and is returned with the whole buffer."""
        return super().append(buffer, new) if new.shape[2] > 1 else buffer.index_copy_(2, self.position, new)


def eager_step(model, idx, cache):
    """The likeliest next ids (B, 1) behind the ids (B, T), which continue what the cache holds."""
    return model(idx, cache=cache)[0].argmax(-1)


def static_step(model, idx, cache):
    """The same for one id per sequence, the one at `cache.position`, with attention over a whole StaticCache."""
    rope = model.cos[cache.position], model.sin[cache.position]  # (1, 1, hd)
    mask = torch.arange(cache.max_len, device=idx.device) <= cache.position
    x = model.hidden(idx, rope, mask[None], cache)  # (B, 1, n_embd)
    return model.head(model.norm(x)).argmax(-1)


def compiled_step(device):
    """`static_step` compiled so that Python costs little between its kernels: by CUDA graphs, or by a C++ wrapper on a CPU."""
    how = {"cuda": {"mode": "reduce-overhead"}, "cpu": {"options": {"cpp_wrapper": True}}}.get(device.type, {})
    return torch.compile(static_step, fullgraph=True, dynamic=False, **how)


def synchronize(device):
    """Wait for the work that was queued on `device`."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()


def copy_speed(device, nbytes=2**28):
    """Bytes per second that a copy of `nbytes` random bytes reads and writes (zeros need not come from memory)."""
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source).copy_(source)
    synchronize(device)
    start = time.perf_counter()
    target.copy_(source)
    synchronize(device)
    return 2 * nbytes / (time.perf_counter() - start)


class Contestant:
    """One of MODELS with random weights, and a cache for `batch_size` x `block_size` tokens."""

    def __init__(self, name, block_size, batch_size, args):
        self.config = model_config(name, args.size, block_size)
        with args.device:
            self.model = GPT(self.config).to(args.dtype).eval()
            self.prompt = torch.randint(self.config.vocab_size, (batch_size, block_size - args.new_tokens))
        if args.device.type == "cpu" and batch_size == 1:
            store_by_columns(self.model)
        self.step, cache_class = eager_step, KVCache
        if args.compile:
            self.step, cache_class = compiled_step(args.device), StaticCache
        before = torch.cuda.memory_allocated()  # 0 on a machine without CUDA
        self.cache = cache_class(self.config, batch_size, block_size, args.device, args.dtype)
        self.cuda_cache = torch.cuda.memory_allocated() - before

    @torch.no_grad()
    def run(self):
        """Read the prompt and decode greedily until the cache is full. Returns the tokens per second of both."""
        device, (batch_size, length) = self.prompt.device, self.prompt.shape
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.cache.length = 0
        start = time.perf_counter()
        idx = eager_step(self.model, self.prompt, self.cache)
        synchronize(device)
        read = time.perf_counter()
        for position in range(length, self.cache.max_len):
            if isinstance(self.cache, StaticCache):
                self.cache.position.fill_(position)
            idx = self.step(self.model, idx, self.cache).clone()  # CUDA graphs write each result to the same place
        synchronize(device)
        end = time.perf_counter()
        self.cuda_peak = self.cuda_cache + torch.cuda.max_memory_allocated() - before  # cache and intermediate results
        return batch_size * length / (read - start), batch_size * (self.cache.max_len - length) / (end - read)


def measure(block_size, batch_size, args, progress):
    """Time all MODELS in turn, `args.repeats` times after a warm-up. Returns a row of figures per model, as a dict."""
    torch.compiler.reset()
    models = {name: Contestant(name, block_size, batch_size, args) for name in MODELS}
    runs = {name: [] for name in MODELS}
    copies = []
    for i in range(1 + args.repeats):
        copies.append(copy_speed(args.device))
        for name, contestant in models.items():
            speeds = contestant.run()
            progress(block_size * batch_size)
            if i > 0:
                runs[name].append(speeds)
    rows = []
    for name, c in models.items():
        n_params, itemsize = c.model.num_params(), args.dtype.itemsize
        prefill, decode = zip(*runs[name])
        past = block_size - (args.new_tokens + 1) / 2  # on average over the decode steps
        step_bytes = decode_bytes(c.config, n_params, batch_size, past, itemsize)
        fit = sequences_that_fit(args.budget * 2**30, n_params * itemsize, c.cache.nbytes // batch_size)
        row = {"model": name, "block_size": block_size, "batch_size": batch_size, "parameters": n_params}
        row |= {"cache_bytes_per_token": c.cache.nbytes // (batch_size * block_size), "cache_bytes": c.cache.nbytes}
        row |= {"ratio_measured": c.cache.nbytes / models["Transformer"].cache.nbytes}
        row |= {"ratio_by_formula": cache_ratio(c.config), "sequences_in_budget": fit}
        row |= {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode, "decode_step_bytes": step_bytes}
        row |= {"decode_bytes_per_s": step_bytes * median(decode) / batch_size, "copy_bytes_per_s": median(copies)}
        rows.append(row | {"cuda_peak_bytes": c.cuda_peak})
    return rows


def pick_machine(args):
    """Put a torch.device and a torch.dtype in place of their names. ValueError if they are not there."""
    args.device = pick_device(args.device)
    args.dtype = pick_dtype(args.dtype, args.device)
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device.index or 0)  # what synchronises and counts memory then means this one


def median_and_range(values, digits):
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def mode(args):
    """How the models ran, such as "float32, cpu, eager"."""
    return f"{args.dtype}, {args.device}, {'compiled' if args.compile else 'eager'}".removeprefix("torch.")


def print_table(columns):
    """Print {title: cells} as an aligned Markdown table, the first column to the left and all others to the right."""
    widths = [max(map(len, [title, *cells])) for title, cells in columns.items()]
    lines = [columns, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])], *zip(*columns.values())]
    for first, *others in lines:
        print("|", " | ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]), "|")


def print_kv(rows, args):
    """Print the rows of `measure` as a table, below a line that says how they were measured."""
    context, copied = rows[0]["block_size"], rows[0]["copy_bytes_per_s"]
    batch = f"batch {rows[0]['batch_size']}, context {context:,}, of which {args.new_tokens} decoded"
    print(f"\n{args.size}, {mode(args)}, {batch};")
    print(f"median of {args.repeats} runs (slowest..fastest); copying memory moves {copied / 1e9:.1f} GB/s\n")
    columns = {
        "model": [r["model"] for r in rows],
        "params": [f"{r['parameters'] / 1e6:.1f}M" for r in rows],
        "B/token": [f"{r['cache_bytes_per_token']:,}" for r in rows],
        "cache bytes": [f"{r['cache_bytes']:,}" for r in rows],
        "measured": [f"{r['ratio_measured']:.2%}" for r in rows],
        "formula": [f"{r['ratio_by_formula']:.2%}" for r in rows],
        "prefill/s": [f"{median(r['prefill_tokens_per_s']):,.0f}" for r in rows],
        "decode tokens/s": [median_and_range(r["decode_tokens_per_s"], 1) for r in rows],
        f"in {args.budget:g} GiB": [f"{r['sequences_in_budget']:,}" for r in rows],
        "MB/step": [f"{r['decode_step_bytes'] / 1e6:.1f}" for r in rows],
        "GB/s": [f"{r['decode_bytes_per_s'] / 1e9:.1f}" for r in rows],
    }
    if args.device.type == "cuda":
        columns["peak bytes"] = [f"{r['cuda_peak_bytes']:,}" for r in rows]
    print_table(columns)


def plot_kv(rows, path):
    """Draw cache size and decode speed against the context length, two panels per batch size."""
    panels = []
    for batch_size in sorted({r["batch_size"] for r in rows}):
        cache, speed = {}, {}
        for name in MODELS:
            mine = [r for r in rows if r["model"] == name and r["batch_size"] == batch_size]
            cache[name] = [(r["block_size"], r["cache_bytes"] / 1e6) for r in mine]
            speed[name] = [(r["block_size"], median(r["decode_tokens_per_s"])) for r in mine]
        contexts = [block_size for block_size, _ in cache["Transformer"]]
        axis = {"xlabel": "context length in tokens", "xscale": "log", "xticks": contexts, "xticklabels": contexts}
        panels.append((cache, axis | {"title": f"KV cache, batch {batch_size}", "ylabel": "MB", "yscale": "log"}))
        speed_axis = {"title": f"Decoding, batch {batch_size}", "ylabel": "tokens per second", "ylim": (0, None)}
        panels.append((speed, axis | speed_axis))
    draw(panels, path)


def draw(panels, path):
    """Draw panels, each ({name: [(x, y), ...]}, settings of matplotlib's Axes), two in a row, with one legend for all."""
    import matplotlib.pyplot as plt  # optional, and slow to import

    rows = (len(panels) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(11, 4 * rows), squeeze=False)
    names = list(dict.fromkeys(name for lines, _ in panels for name in lines))
    styles = dict(zip(names, itertools.cycle(("o-", "x:", "s-", "^--", "v-", "D--", "P-", "*-"))))
    legend = {}
    for axis, (lines, settings) in zip(axes.flat, panels):
        for name, points in lines.items():
            size = 4 if len(points) < 50 else 0
            x, y = [x for x, _ in points], [y for _, y in points]
            (legend[name],) = axis.plot(x, y, styles[name], color=f"C{names.index(name)}", markersize=size)
        axis.set(**settings)
        axis.xaxis.set_tick_params(which="minor", bottom=False, labelbottom=False)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    axes[0, 1].legend(legend.values(), legend, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)


def check_files(*paths, plot=None):
    """ValueError, before the work begins, for a file that cannot be written, or a plot without matplotlib."""
    for path in filter(None, (*paths, plot)):
        path, folder = Path(path), Path(path).parent
        if path.exists() and not path.is_file() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"cannot write {path}")
    if plot:
        if Path(plot).suffix != ".png":
            raise ValueError(f"--plot draws a .png, not {plot}")
        try:
            import matplotlib.pyplot  # noqa: F401
        except ImportError:
            raise ValueError("--plot needs matplotlib: pip install matplotlib") from None


def show_progress(total):
    """Return a function that is told of work as it is done, until it makes `total`, and shows the time left."""
    done, start = 0, time.time()

    def progress(work):
        nonlocal done
        done += work
        left = (time.time() - start) * (total - done) / done
        end = "\n" if done == total else ""
        print(f"\r{done / total:4.0%}, about {left:.0f} s left   ", end=end, file=sys.stderr, flush=True)

    return progress


def write_json(rows, args):
    """Write the figures of a table to --json, with the settings and the versions that they were measured with."""
    if args.json:
        about = {"torch": torch.__version__, "python": platform.python_version()}
        about["processor"] = platform.processor() or platform.machine()
        about |= {"threads": torch.get_num_threads()} | vars(args)
        with replacing(args.json, "w") as file:
            json.dump({**about, "rows": rows}, file, indent=1, default=str)  # a device and a dtype as they print


def compiler_works(device):
    """Whether torch.compile works here; says why not on stderr."""
    try:
        torch.compile(lambda x: x + 1, options={"fx_graph_cache": False})(torch.zeros(8, device=device))
        return True
    except Exception as error:  # what a missing compiler raises differs between versions and devices
        print(f"going on without --compile: {str(error).splitlines()[0]}", file=sys.stderr)
        return False


def kv(argv):
    """The KV cache and the speed of MODELS."""
    parser = Parser(prog="bench.py kv", description="KV cache and speed of eight models with random weights.",
                    epilog="Other tables: bench.py train, bench.py loss and bench.py attention, each with a --help.")
    parser.add_argument("--size", default="82M", help="a size of the paper: 2M, 82M, 180M or 468M")
    parser.add_argument("--block_size", type=int, nargs="+", default=[1024], help="context lengths in tokens")
    parser.add_argument("--batch_size", type=int, nargs="+", default=[1], help="sequences at a time")
    parser.add_argument("--new_tokens", type=int, default=32, help="tokens to decode at the end of the context")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each model")
    parser.add_argument("--budget", type=float, default=8.0, help="GiB for the weights and as many caches as fit")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... or mps")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16")
    parser.add_argument("--compile", action="store_true", help="compile the decode step; with CUDA graphs on CUDA")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the figures; needs matplotlib")
    args = parser.parse_args(argv)
    if min(*args.batch_size, args.new_tokens, args.repeats) < 1:
        raise ValueError("batch_size, new_tokens and repeats must be at least 1")
    if not 0 < args.budget < math.inf:
        raise ValueError(f"budget must be above 0 and finite, not {args.budget}")
    args.block_size, args.batch_size = sorted(set(args.block_size)), sorted(set(args.batch_size))
    if min(args.block_size) < args.new_tokens + 2:
        raise ValueError(f"block_size {min(args.block_size)} must be at least 2 more than new_tokens {args.new_tokens}")
    check_files(args.json, plot=args.plot)
    pick_machine(args)
    model_config("Transformer", args.size, 2)  # an unknown size ends here
    args.compile = args.compile and compiler_works(args.device)

    progress = show_progress((1 + args.repeats) * len(MODELS) * sum(args.block_size) * sum(args.batch_size))
    rows = []
    for block_size in args.block_size:
        for batch_size in args.batch_size:
            rows += measure(block_size, batch_size, args, progress)
            print_kv(rows[-len(MODELS) :], args)
    write_json(rows, args)
    if args.plot:
        plot_kv(rows, args.plot)


VARIANTS = {"Transformer": {}}  # flags of GPTConfig
VARIANTS |= {f"ResFormer, {mode}": {"value_residual": True, "lambda_mode": mode} for mode in LAMBDA_MODES}
VARIANTS |= {"SVFormer": {"shared_value": True}}


def train_flops(model, batch_size, block_size):
    """
    Floating-point operations of the products in a training step: per token 6 for each weight of a matrix (2 forward, 4
    backward), and in causal attention, which sees half of block_size on average, 6 x block_size x n_embd per layer.
    """
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    attention = model.config.n_layer * block_size * model.config.n_embd
    return 6 * (weights + attention) * batch_size * block_size


def matmul_speed(device, dtype):
    """FLOP/s of a product of two large square matrices: the ceiling for a training step."""
    n = 2048 if device.type == "cpu" else 8192
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    a @ b
    synchronize(device)
    start = time.perf_counter()
    a @ b
    synchronize(device)
    return 2 * n**3 / (time.perf_counter() - start)


class Trainee:
    """A model with random weights, and all that train.py needs to train it."""

    def __init__(self, flags, args):
        changes = {"block_size": args.block_size} if args.block_size else {}
        config = GPTConfig.paper(args.size, **changes, **flags) if args.size else GPTConfig(**changes, **flags)
        self.s, self.device = Settings(batch_size=args.batch_size), args.device
        self.model = GPT(config).to(args.device)
        self.optimizer, self.scaler, self.autocast = step_tools(self.model, self.s, args.device, args.dtype)
        self.ids = torch.randint(config.vocab_size, (args.batch_size, config.block_size), device=args.device)
        if args.compile:
            compile_model(self.model, self.ids, self.ids, self.s, self.autocast)

    def step(self):
        """Train for a step. Returns its seconds."""
        synchronize(self.device)
        start = time.perf_counter()
        train_step(self.model, self.optimizer, self.scaler, self.ids, self.ids, self.s, self.autocast)
        synchronize(self.device)
        return time.perf_counter() - start


def step_memory(flags, args):
    """The peak memory in bytes of a process that trains a model for two steps."""
    trainee = Trainee(flags, args)
    trainee.step()
    trainee.step()
    return peak_memory(args.device)


def train(argv):
    """Time and memory of a training step of each of VARIANTS, next to the Transformer's."""
    parser = Parser(prog="bench.py train", description="Time and memory of a training step, with random tokens.")
    parser.add_argument("--size", help="a size of the paper: 2M, 82M, 180M or 468M; without, the default of train.py")
    parser.add_argument("--block_size", type=int, help="context length in tokens; without, that of the size")
    parser.add_argument("--batch_size", type=int, default=Settings.batch_size, help="sequences per step")
    parser.add_argument("--repeats", type=int, default=10, help="pairs of steps, one of the Transformer in each")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... or mps")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16")
    parser.add_argument("--compile", type=boolean, nargs="?", const=True, default=True, help="use torch.compile")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    args = parser.parse_args(argv)
    if min(args.batch_size, args.repeats, 1 if args.block_size is None else args.block_size) < 1:
        raise ValueError("block_size, batch_size and repeats must be at least 1")
    check_files(args.json)
    pick_machine(args)
    args.compile = args.compile and compiler_works(args.device)

    progress = show_progress(len(VARIANTS) * (args.repeats + 2))
    peak = {}
    for name, flags in VARIANTS.items():  # each in a process of its own
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                peak[name] = pool.submit(step_memory, flags, args).result()
            except BrokenProcessPool:  # what a system without memory does to a process
                raise MemoryError from None
        progress(1)
    ceiling = []
    first = Trainee(VARIANTS["Transformer"], args)
    first.step()
    rows = []
    for name, flags in VARIANTS.items():
        trainee = first if name == "Transformer" else Trainee(flags, args)
        trainee.step()
        progress(1)
        pairs = []
        for i in range(args.repeats):
            ceiling.append(matmul_speed(args.device, args.dtype))
            order = (first, trainee) if i % 2 else (trainee, first)  # so that neither always has the warmer machine
            seconds = {one: one.step() for one in dict.fromkeys(order)}  # the Transformer is its own pair
            pairs.append((seconds[first], seconds[trainee]))
            progress(1)
        block_size = trainee.model.config.block_size
        row = {"model": name, "parameters": trainee.model.num_params(), "peak_bytes": peak[name]}
        row |= {"flops": train_flops(trainee.model, args.batch_size, block_size), "pairs_of_seconds": pairs}
        rows.append(row | {"tokens_per_step": args.batch_size * block_size})
    for row in rows:
        row["matmul_flops_per_s"] = median(ceiling)
    print_train(rows, args)
    write_json(rows, args)


def print_train(rows, args):
    """
    Print the rows of `train` as a table, below a line that says how they were measured. A model's time is that of the
    Transformer's steps in all pairs times the model's own ratio, so that all rows are those of the same machine.
    """
    ratios = [[own / first for first, own in r["pairs_of_seconds"]] for r in rows]
    first = median(first for r in rows for first, _ in r["pairs_of_seconds"])
    seconds = [first * median(r) for r in ratios]
    ceiling = rows[0]["matmul_flops_per_s"]
    print(f"\n{mode(args)}, {args.batch_size} sequences, {rows[0]['tokens_per_step']:,} tokens per step; medians of")
    print(f"{args.repeats} pairs of steps (smallest..largest); a matrix product runs at {ceiling / 1e9:,.0f} GFLOP/s\n")
    columns = {
        "model": [r["model"] for r in rows],
        "params": [f"{r['parameters'] / 1e6:.2f}M" for r in rows],
        "ms/step": [f"{1e3 * s:,.1f}" for s in seconds],
        "tokens/s": [f"{r['tokens_per_step'] / s:,.0f}" for r, s in zip(rows, seconds)],
        "step time / Transformer's": [median_and_range(r, 3) for r in ratios],
        "peak MiB": [f"{r['peak_bytes'] / 2**20:,.0f}" for r in rows],
        "of product rate": [f"{r['flops'] / s / ceiling:.1%}" for r, s in zip(rows, seconds)],
    }
    print_table(columns)


class Run:
    """A finished run of train.py. ValueError if there is none in `folder`, or one that is damaged or not finished."""

    def __init__(self, folder):
        self.model, self.checkpoint = load_checkpoint(Path(folder, "ckpt.pt"))
        self.settings = Settings(**self.checkpoint["settings"])
        self.name = Path(folder).resolve().name
        self.data = self.checkpoint["meta"]["sha256"]
        count = self.settings.eval_iters * self.settings.batch_size  # 0 for the whole split
        self.validation = self.data, self.model.config.block_size, count  # losses compare where this is equal
        if self.checkpoint["iter"] < self.settings.max_iters:
            raise ValueError(f"{folder} is not finished: python train.py --resume --out_dir {folder}")
        path = Path(folder, "log.csv")
        try:
            with open(path, newline="", encoding="utf-8") as file:
                self.log = [{name: float(row[name] or "nan") for name in LOG_COLUMNS} for row in csv.DictReader(file)]
            self.last = self.log[-1]
            used = [row[name] for row in self.log for name in ("tokens", "train_loss", "tokens_per_s")]
            whole = all(map(math.isfinite, [*used, self.last["val_loss"], self.last["val_bpb"]]))
            ordered = all(row["iter"] < after["iter"] for row, after in itertools.pairwise(self.log))
            end = self.checkpoint["iter"], round(self.checkpoint["seconds"], 2)
            if not (whole and ordered and min(used) > 0 and (self.last["iter"], self.last["seconds"]) == end):
                raise ValueError
        except (ValueError, LookupError, TypeError, csv.Error):
            raise ValueError(f"{path} is damaged or not that of ckpt.pt: repeat the run with --overwrite") from None
        self.validated = [row for row in self.log if math.isfinite(row["val_loss"])]
        self.speed = median(row["tokens_per_s"] for row in self.log)
        self.lambdas = list(self.model.lambdas().values()) if self.model.lambdas else []  # of the layers n >= 2

    def what(self):
        """What was trained, but for the seed: runs for which this is equal differ by chance alone."""
        apart = {"seed": 0, "out_dir": None, "size": None, "resume": False, "overwrite": False, "log_interval": 1}
        apart |= {"compile": True, "device": "auto"}
        return self.model.config, self.data, dataclasses.replace(self.settings, **apart)

    def figures(self):
        """A row of results.csv."""
        config, s, last = self.model.config, self.settings, self.last
        kind = "ResFormer" if config.value_residual else "SVFormer" if config.shared_value else "Transformer"
        row = {"run": self.name, "model": kind, "variant": config.lambda_mode if config.value_residual else ""}
        row |= {"seed": s.seed, "dataset": s.dataset, "parameters": self.model.num_params(), "n_layer": config.n_layer}
        row |= {"n_embd": config.n_embd, "block_size": config.block_size, "learning_rate": s.learning_rate}
        row |= {"steps": s.max_iters, "tokens": int(last["tokens"]), "tokens_per_s": round(self.speed)}
        row |= {name: round(last[name], 5) for name in ("train_loss", "val_loss", "val_bpb")}
        row |= {"val_losses": " ".join(f"{row['iter']:.0f}:{row['val_loss']:.5f}" for row in self.validated)}
        return row | {f"lambda_{i + 1}": " ".join(f"{pair[i]:.3f}" for pair in self.lambdas) for i in (0, 1)}


def load_runs(folders):
    """The runs in `folders`, whose names must differ: they stand for them in tables, plots and files."""
    runs = {}
    for run in map(Run, folders):
        if run.name in runs:
            raise ValueError(f"two runs are called {run.name}: name each run once, and rename folders of the same name")
        runs[run.name] = run
    return list(runs.values())


def tokens_to_reach(validated, loss):
    """Tokens until the validation loss was down at `loss`, between validations by a straight line; nan if it never was."""
    for before, after in zip(validated, validated[1:]):
        if after["val_loss"] <= loss < before["val_loss"]:
            part = (before["val_loss"] - loss) / (before["val_loss"] - after["val_loss"])
            return before["tokens"] + part * (after["tokens"] - before["tokens"])
    return math.nan


def confidence(differences):
    """The mean of paired differences and half the width of its 95% interval by Student's t, nan for a single one."""
    n = len(differences)
    t = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)[min(max(n, 2), 11) - 2]  # from 12 on a bit wide
    return mean(differences), t * stdev(differences) / math.sqrt(n) if n > 1 else math.nan


def relative_curve(pairs, window=5):
    """[(step, training loss minus the baseline's at that step)], means over pairs (run, baseline) and `window` lines of log."""
    logs = [[{row["iter"]: row["train_loss"] for row in run.log} for run in pair] for pair in pairs]
    steps = sorted(set.intersection(*(set(log) for pair in logs for log in pair)))
    points = [(step, mean(own[step] - theirs[step] for own, theirs in logs)) for step in steps]
    parts = [points[i : i + window] for i in range(len(points) - window + 1)]
    return [(part[window // 2][0], mean(difference for _, difference in part)) for part in parts]


def loss(argv):
    """The losses of trained runs, next to those of the first one's model with the same seeds."""
    parser = Parser(prog="bench.py loss", description="Losses of runs; those that differ in nothing but --seed are one row.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a folder of train.py; the first one's model is the baseline, "
                        "for the runs that are validated on the same windows and have one of its seeds")
    parser.add_argument("--csv", metavar="FILE", help="write a row per run to FILE, keeping the rows of other runs in it")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the losses, means over seeds; needs matplotlib")
    args = parser.parse_args(argv)
    check_files(args.csv, plot=args.plot)
    runs = load_runs(args.runs)
    groups = []
    for run in runs:
        group = next((group for group in groups if group[0].what() == run.what()), None)
        if run.settings.seed in [other.settings.seed for other in group or []]:
            raise ValueError(f"{run.name} has the settings and the seed of another run: name one of them")
        groups.append([run]) if group is None else group.append(run)
    write_csv([run.figures() for run in runs], args.csv)
    baseline = {run.settings.seed: run for run in groups[0]}
    rows, curves, relative = [], {}, {}
    for group in groups:
        name = group[0].name.removesuffix(f"-{group[0].settings.seed}" if len(group) > 1 else "")
        final = [run.last["val_loss"] for run in group]
        spread = f" ({min(final):.4f}..{max(final):.4f})" if len(group) > 1 else ""
        row = {"model": name, "params": f"{group[0].model.num_params() / 1e6:.3f}M", "seeds": f"{len(group)}"}
        row |= {"tokens": f"{group[0].last['tokens'] / 1e6:.2f}M", "validation loss, nats": f"{mean(final):.4f}{spread}"}
        row |= {"bits/byte": f"{mean(run.last['val_bpb'] for run in group):.4f}"}
        alike = [run for run in group if run.settings.seed in baseline and run.validation == runs[0].validation]
        pairs = [(run, baseline[run.settings.seed]) for run in alike]
        if pairs:
            difference, margin = confidence([run.last["val_loss"] - other.last["val_loss"] for run, other in pairs])
            needed = [tokens_to_reach(run.validated, other.last["val_loss"]) / other.last["tokens"] for run, other in pairs]
            row |= {"difference": f"{difference:+.4f} ± {margin:.4f}".removesuffix(" ± nan")}
            if len(pairs) < len(group):
                row["difference"] += f" ({len(pairs)} of {len(group)} seeds)"
            row |= {"tokens saved": "-" if math.isnan(mean(needed)) else f"{1 - mean(needed):.1%}"}
            row |= {"speed": f"{mean(run.speed / other.speed for run, other in pairs):.2f}x"}
            relative[name] = relative_curve(pairs)
        steps = zip(*(run.validated for run in group))  # which a group's runs make at the same steps
        curves[name] = [(step[0]["tokens"] / 1e6, mean(row["val_loss"] for row in step)) for step in steps]
        rows.append(row)
    print_table({title: [row.get(title, "-") for row in rows] for title in rows[0]})
    mixing = [run for run in runs if run.lambdas]
    if mixing:
        print("\nlambda_{n,1}/lambda_{n,2} of the layers n >= 2, as they ended:")
    for run in mixing:
        print(f"{run.name}:", " ".join(f"{first:.2f}/{own:.2f}" for first, own in run.lambdas))
    if args.plot:
        first = next(iter(curves))
        relative_axis = {"title": f"training loss minus {first}'s", "xlabel": "step"}
        draw([(curves, {"title": "validation loss, nats", "xlabel": "million tokens"}), (relative, relative_axis)], args.plot)


def read_csv(path, titles):
    """The rows of the CSV file at `path`, none if there is no such file. ValueError if its columns are not `titles`."""
    if not path or not Path(path).exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        try:
            rows = list(csv.DictReader(file, titles))
        except (UnicodeDecodeError, csv.Error):
            rows = []
    if rows[:1] != [dict(zip(titles, titles))] or any(None in row for row in rows):
        raise ValueError(f"{path} has other columns than {', '.join(titles)}: name another file, or none that exists")
    return rows[1:]


def write_csv(rows, path):
    """Write rows to the CSV file at `path`, if one is named, in place of those of the same runs. Errors as in `read_csv`."""

    def by_run(rows):
        return {run: list(own) for run, own in itertools.groupby(rows, lambda row: row["run"])}

    if not path:
        return
    titles = list(rows[0])
    runs = by_run(read_csv(path, titles)) | by_run(rows)
    with replacing(path, "w") as file:
        writer = csv.DictWriter(file, titles)
        writer.writeheader()
        writer.writerows(itertools.chain(*runs.values()))


MEASURES = ["entropy", "importance of token 1", "value norm", "hidden norm", "similarity"]


class AttentionInputs(TorchFunctionMode):
    """Inside this context, `calls` collects what each layer's attention is given: q, k and v, (B, nh or nkv, T, hd)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.calls.append(args[:3])
        return func(*args, **kwargs or {})


@torch.no_grad()
def concentration(model, idx):
    """
    How much attention concentrates on few tokens, and what this does to the states (arXiv 2410.17897): (MEASURES, n_layer),
    means over the sequences idx (B, T). Norms are those of the first token's state relative to the mean of the others'.
    """
    hidden = []
    hooks = [block.register_forward_hook(lambda block, args, out: hidden.append(out[0])) for block in model.blocks]
    with AttentionInputs() as inputs:
        model(idx)
    for hook in hooks:
        hook.remove()
    T = idx.shape[1]
    future = torch.ones(T, T, dtype=torch.bool, device=idx.device).triu(1)

    def first_norm(states):  # (B, T, C) to (B,)
        norms = states.norm(dim=-1)
        return norms[:, 0] / norms[:, 1:].mean(1)

    layers = []
    for (q, k, v), h in zip(inputs.calls, hidden):
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(2, 3) / math.sqrt(q.shape[3])
        a = scores.masked_fill(future, -math.inf).softmax(-1).mean((1, 2))  # (B, T): importance, the means of A's columns
        direction = F.normalize(h, dim=-1)
        similarity = (direction.sum(1).square().sum(-1) - T) / (T * (T - 1))  # the mean over all pairs i != j
        v = v.transpose(1, 2).flatten(2)  # (B, T, nkv * hd)
        entropy = torch.special.entr(a / a.sum(-1, keepdim=True)).sum(-1)
        layers.append(torch.stack([entropy, a[:, 0], first_norm(v), first_norm(h), similarity]).mean(1))
    return torch.stack(layers, dim=1)


def attention(argv):
    """The attention-concentration measures of trained runs, per layer."""
    parser = Parser(prog="bench.py attention", description="How attention concentrates in each layer, on validation text.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a folder of train.py")
    parser.add_argument("--sequences", type=int, default=64, help="windows of validation text, spread evenly; no more than fit")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... or mps")
    parser.add_argument("--csv", metavar="FILE", help="write a row per layer to FILE, keeping the rows of other runs in it")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the measures; needs matplotlib")
    args = parser.parse_args(argv)
    if args.sequences < 1:
        raise ValueError(f"sequences must be at least 1, not {args.sequences}")
    check_files(args.csv, plot=args.plot)
    read_csv(args.csv, ["run", "layer", *MEASURES])  # refused now, not after the work
    device = pick_device(args.device)
    panels, rows = {measure: {} for measure in MEASURES}, []
    for run in load_runs(args.runs):
        folder, block_size = Path("data", run.settings.dataset), run.model.config.block_size
        meta, _, data = load_dataset(folder)
        if meta["sha256"] != run.data:
            raise ValueError(f"{folder} is not the data that {run.name} was trained on")
        count = min(args.sequences, (len(data) - 1) // block_size)
        starts = np.linspace(0, len(data) - block_size - 1, count).astype(np.int64)
        idx, _ = windows(data, starts, block_size, device)
        model = run.model.to(device)
        means = torch.stack([concentration(model, sequence) for sequence in idx.split(1)]).mean(0).tolist()
        for n, values in enumerate(zip(*means), start=1):
            rows.append({"run": run.name, "layer": n} | {m: round(value, 5) for m, value in zip(MEASURES, values)})
        print(f"\n{run.name}: means over {len(idx)} sequences of {block_size} tokens; norms are token 1's over the others'\n")
        cells = {measure: [f"{value:.3f}" for value in values] for measure, values in zip(MEASURES, means)}
        print_table({"layer": [str(n + 1) for n in range(len(means[0]))]} | cells)
        for measure, values in zip(MEASURES, means):
            panels[measure][run.name] = list(enumerate(values, start=1))
    write_csv(rows, args.csv)
    if args.plot:
        layers = sorted({n for lines in panels.values() for points in lines.values() for n, _ in points})
        axis = {"xlabel": "layer", "xticks": layers}
        draw([(lines, axis | {"title": measure}) for measure, lines in panels.items()], args.plot)


TABLES = {"kv": kv, "train": train, "loss": loss, "attention": attention}


def main():
    name, argv = (sys.argv[1], sys.argv[2:]) if sys.argv[1:] and sys.argv[1][0] != "-" else ("kv", sys.argv[1:])
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}: choose from {', '.join(TABLES)}")
    TABLES[name](argv)


if __name__ == "__main__":
    run(main)
