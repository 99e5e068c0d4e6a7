"""
Train a model of model.py on the tokens of prepare_data.py:

    python train.py                    a Transformer on the default corpus, about ten minutes on two CPU cores
    python train.py --value_residual   the same as a ResFormer
    python train.py --shared_value     the same as an SVFormer
    python train.py --resume --out_dir out/resformer   go on with a run that was stopped
    torchrun --standalone --nproc_per_node=2 train.py  data-parallel, in two processes
    python train.py --help             all settings

A run folder holds log.csv, the losses, and ckpt.pt, which alone is enough to sample or to resume.
"""

import argparse
import csv
import dataclasses
import math
import os
import shlex
import signal
import sys
import time
import typing
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from model import GPT, GPTConfig, setting
from prepare_data import Parser, load_dataset, replacing, run

# What torch.compile makes is code: it stays in the project's own folder instead of one that all users share.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.abspath("out/.compiled"))

LOG_COLUMNS = ["iter", "tokens", "train_loss", "val_loss", "val_bpb", "lr", "grad_norm", "tokens_per_s", "seconds"]


@dataclass
class Settings:
    """How to train. Each field is a flag, as is each field of GPTConfig but vocab_size, which the data decides."""

    out_dir: str | None = setting(None, "run folder (default: out/ and the model's name)")
    resume: bool = setting(False, "go on with the run in out_dir, with its settings")
    overwrite: bool = setting(False, "replace the run in out_dir")
    dataset: str = setting("python", "folder of tokens below data/, made by prepare_data.py")
    size: str | None = setting(None, "a size of the paper, 2M, 82M, 180M or 468M: sets the model's shape and context")
    batch_size: int = setting(16, "sequences per forward pass")
    gradient_accumulation_steps: int = setting(1, "forward passes per optimizer step")
    learning_rate: float = setting(2e-3, "peak learning rate")
    min_lr: float | None = setting(None, "learning rate at the end (default: a tenth of the peak)")
    warmup_iters: int = setting(60, "steps of linear warmup")
    max_iters: int = setting(600, "optimizer steps")
    weight_decay: float = setting(0.1, "AdamW's, on matrices only")
    beta1: float = setting(0.9, "AdamW's")
    beta2: float = setting(0.95, "AdamW's")
    grad_clip: float = setting(1.0, "largest gradient norm, 0 for no limit")
    eval_interval: int = setting(200, "steps between validations, each of which also saves ckpt.pt")
    eval_iters: int = setting(40, "batches per validation, spread evenly over val.bin; 0 for all of it")
    log_interval: int = setting(10, "steps between lines of the log")
    seed: int = setting(1337, "seed of the weights and of the order of the data")
    device: str = setting("auto", "cpu, cuda, cuda:1 ... or mps")
    dtype: str = setting("auto", "float32, bfloat16 or float16 (auto: bfloat16 or float16 on CUDA, else float32)")
    compile: bool = setting(True, "use torch.compile")

    def __post_init__(self):
        for name, least in dict(batch_size=1, gradient_accumulation_steps=1, warmup_iters=0, max_iters=1, weight_decay=0,
                                grad_clip=0, eval_interval=1, eval_iters=0, log_interval=1, seed=0).items():  # fmt: skip
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= (self.min_lr or 0) <= self.learning_rate < math.inf:
            raise ValueError(f"learning_rate {self.learning_rate} must be finite, and min_lr {self.min_lr} not above it")
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"beta1 {self.beta1} and beta2 {self.beta2} must be at least 0 and below 1")


def boolean(text):
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def integers(text):
    return tuple(int(number) for number in text.split(","))


def parse_flags():
    """Return the flags that were given, as two dicts: fields of Settings, and fields of GPTConfig."""
    parser = Parser(description=__doc__.split("\n\n")[0], argument_default=argparse.SUPPRESS)
    for f in [*fields(Settings), *(f for f in fields(GPTConfig) if f.name != "vocab_size")]:
        kind = next(iter(typing.get_args(f.type)), f.type)  # int for `int | None`
        kind = {bool: boolean, tuple[int, ...]: integers}.get(kind, kind)
        help = f.metadata["help"] + ("" if f.default is None else f" (default: {f.default})")
        optional = dict(nargs="?", const=True) if kind is boolean else {}
        parser.add_argument(f"--{f.name}", type=kind, help=help, metavar=kind.__name__.upper(), **optional)
    given = vars(parser.parse_args())
    model_flags = {f.name: given.pop(f.name) for f in fields(GPTConfig) if f.name in given}
    if given.get("resume"):
        return given, model_flags
    if not model_flags.get("value_residual"):
        for name in ("lambda_mode", "lambda_1", "lambda_2", "sparse_layers"):
            if name in model_flags:
                raise ValueError(f"--{name} is for the ResFormer only: add --value_residual")
    if "sparse_layers" in model_flags and model_flags.get("lambda_mode") != "sparse":
        raise ValueError("--sparse_layers is for --lambda_mode=sparse only")
    return given, model_flags


def model_name(config, size):
    """A name for the run folder, such as resformer, resformer-plus-82M or svformer-gqa1-cla2."""
    kind = "resformer" if config.value_residual else "svformer" if config.shared_value else "transformer"
    parts = [kind, size]
    if config.value_residual and config.lambda_mode != GPTConfig.lambda_mode:
        parts.insert(1, config.lambda_mode)
    if config.kv_heads != config.n_head:
        parts.append(f"gqa{config.kv_heads}")
    if config.kv_share > 1:
        parts.append(f"cla{config.kv_share}")
    return "-".join(part for part in parts if part)


def pick_device(name):
    """The torch.device called `name`; auto is CUDA, else MPS, else the CPU. ValueError if it is not there."""
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    if name == "auto":
        return torch.device(next(kind for kind in count if count[kind]))
    try:
        device = torch.device(name)
    except RuntimeError:  # not even a name that torch knows
        device = None
    if device is None or (device.index or 0) >= count.get(device.type, 0):
        there = ", ".join(kind for kind in count if count[kind])
        raise ValueError(f"there is no device {name!r} here: choose from auto, {there}")
    return device


def pick_dtype(name, device):
    """The number format to compute in; auto is the fastest that trains well on `device`. ValueError if it has none."""
    bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        return torch.float32 if device.type != "cuda" else torch.bfloat16 if bf16 else torch.float16
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"unknown dtype {name!r}: choose from auto, float32, bfloat16, float16")
    if name == "float16" and device.type != "cuda" or name == "bfloat16" and not bf16:
        raise ValueError(f"{name} does not work on this {device.type} device: use --dtype=float32")
    return getattr(torch, name)


def load_checkpoint(path):
    """Return (model, checkpoint) from a ckpt.pt, on the CPU. No code in the file can run. ValueError if it is not one."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there is no checkpoint {path}: train.py makes one, --out_dir names its folder")
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            model = GPT(GPTConfig(**checkpoint["config"]))
            model.load_state_dict(checkpoint["model"])
            Settings(**checkpoint["settings"])
            meta = checkpoint["meta"]
            known = meta["encoding"] and meta["sha256"] and meta["vocab_size"] == model.config.vocab_size
            if not (known and checkpoint["iter"] >= 0 and checkpoint["seconds"] >= 0):
                raise ValueError
            if not {"param_groups", "state"} <= checkpoint["optimizer"].keys() or "scaler" not in checkpoint:
                raise ValueError
        except Exception as error:  # a foreign file can fail in any way that its bytes can think of
            raise ValueError(f"{path} is not a checkpoint of train.py, or is damaged ({type(error).__name__})") from None
    return model, checkpoint


def lr_at(step, s):
    """The learning rate of a step, counted from 0: linear warmup, then a cosine down to min_lr, as in the paper."""
    if step < s.warmup_iters:
        return s.learning_rate * (step + 1) / s.warmup_iters
    min_lr = s.learning_rate / 10 if s.min_lr is None else s.min_lr
    progress = (step - s.warmup_iters) / max(1, s.max_iters - s.warmup_iters)
    return min_lr + (s.learning_rate - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def windows(data, starts, block_size, device):
    """Inputs and targets (len(starts), block_size) of the windows of `data` that begin at `starts`."""
    tokens = torch.from_numpy(data[starts[:, None] + np.arange(block_size + 1)].astype(np.int64))
    if device.type == "cuda":  # pinned memory is copied while the GPU computes
        tokens = tokens.pin_memory()
    tokens = tokens.to(device, non_blocking=True)
    return tokens[:, :-1], tokens[:, 1:]


def train_batch(data, s, block_size, step, device, share=slice(None)):
    """
    The batch of a step, a function of (seed, step) alone: the same for every model, and after a resume. Of several
    processes each takes its `share` of the sequences.
    """
    n = s.batch_size * s.gradient_accumulation_steps
    starts = np.random.default_rng([s.seed, step]).integers(len(data) - block_size, size=n)
    return windows(data, starts[share], block_size, device)


def step_tools(model, s, device, dtype):
    """Return what a `train_step` takes besides the model: its optimizer, its gradient scaler and its autocast context."""
    torch.set_float32_matmul_precision("high")  # TF32 for what stays float32 on CUDA
    optimizer = model.optimizer(s.learning_rate, (s.beta1, s.beta2), s.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    return optimizer, scaler, torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def train_step(model, optimizer, scaler, x, y, s, autocast):
    """
    One optimizer step on the sequences x with the targets y, both (n, block_size), s.batch_size of them at a time.
    Returns the loss and the gradient's norm before clipping, (2,), without waiting for the device.
    """
    loss = torch.zeros((), device=x.device)
    for i in range(0, len(x), s.batch_size):
        x_part, y_part = x[i : i + s.batch_size], y[i : i + s.batch_size]
        if dist.is_initialized():  # the processes average their gradients once, behind the last part
            model.require_backward_grad_sync = i + s.batch_size >= len(x)
        with autocast:
            part = model(x_part, y_part)[1] * (len(x_part) / len(x))
        scaler.scale(part).backward()
        loss += part.detach()
    scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack([loss, grad_norm])


@torch.no_grad()
def evaluate(model, data, s, block_size, device, autocast, share=slice(None)):
    """The mean loss in nats per token over the windows that eval_iters asks for, always the same ones."""
    count = (len(data) - 1) // block_size
    chosen = count if s.eval_iters == 0 else min(count, s.eval_iters * s.batch_size)
    starts = np.linspace(0, count - 1, chosen).astype(np.int64)[share] * block_size
    total = torch.zeros((), device=device)
    for i in range(0, len(starts), s.batch_size):
        part = starts[i : i + s.batch_size]
        x, y = windows(data, np.resize(part, s.batch_size), block_size, device)  # a short last batch is filled up ...
        y = y.masked_fill(torch.arange(s.batch_size, device=device)[:, None] >= len(part), -1)  # ... with no targets
        with autocast:
            total += model(x, y)[1] * len(part)
    return sum_over_processes(total).item() / chosen


def join_processes(s, device, n_processes):
    """Join the other processes of torchrun. Returns this one's device. ValueError if they cannot share the work."""
    sequences = s.batch_size * s.gradient_accumulation_steps
    if sequences % n_processes:
        raise ValueError(f"the {sequences} sequences of a step are not divisible by {n_processes} processes")
    if device.type == "mps":
        raise ValueError("several processes cannot share an MPS device: use --device=cpu, or a single process")
    if device.type == "cuda":
        device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def sum_over_processes(x):
    """The sum of the tensors x of all processes, for a single one x itself."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def peak_memory(device):
    """The most bytes in use at a time so far: on CUDA in tensors, on MPS by its driver, else by the process (Windows: nan)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()  # the allocator keeps what it once had
    try:
        import resource
    except ImportError:  # there is none on Windows
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def compile_model(model, x, y, s, autocast):
    """
    Compile the model in place and run one forward and backward pass, so that what cannot work shows now: then the
    model stays as it is. On a CPU each block is compiled by itself, since all later ones reuse the first ones' code.
    """
    parts = [model] if x.device.type == "cuda" else list(model.blocks)
    for part in parts:
        part.compile()
    try:
        with autocast:
            loss = model(x[: s.batch_size], y[: s.batch_size])[1]
        loss.backward()
    except Exception as error:  # no C++ compiler, no Triton, an unsupported Python: many kinds
        print(f"warning: torch.compile does not work here ({type(error).__name__}), going on without", file=sys.stderr)
        for part in parts:
            part._compiled_call_impl = None
    model.zero_grad(set_to_none=True)


def save_checkpoint(path, **state):
    """Write a checkpoint that is whole or not there at all; OSError if it cannot be written."""
    with replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError:  # how torch reports a full disk
            raise OSError(f"{path} could not be written, is the disk full? What was there before is kept") from None


def open_log(path, step):
    """Open log.csv for appending behind the rows up to `step`; what a stopped run wrote after its checkpoint is dropped."""
    rows = []
    if step and path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if len(row) == len(LOG_COLUMNS) and row[0].isdecimal()]
        rows = [row for row in rows if int(row[0]) <= step]
    with replacing(path, "w") as file:
        csv.writer(file).writerows([LOG_COLUMNS, *rows])
    return open(path, "a", newline="", encoding="utf-8")


def await_signal():
    """Return a tensor that is 0 until SIGINT or SIGTERM comes, then its number. A second signal acts at once."""
    stop = torch.zeros((), dtype=torch.int)

    def on_signal(number, frame):
        stop.fill_(number)
        print("stopping after this step; a second signal stops at once", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    return stop


def resumed(checkpoint, path, given, model_flags, meta):
    """Check that the flags and the data are those of the run in `checkpoint`; ValueError with both values if not."""
    was = checkpoint["settings"] | checkpoint["config"] | checkpoint["meta"]
    fixed = ("size", "dataset", "seed", "batch_size", "gradient_accumulation_steps")
    now = {name: given[name] for name in fixed if name in given} | model_flags
    now |= {name: meta[name] for name in ("encoding", "vocab_size", "sha256")}
    for name, value in now.items():
        if was[name] != value:
            raise ValueError(f"{path} was trained with {name} {was[name]}, now it is {value}: start a new run instead")


def main():
    given, model_flags = parse_flags()
    s = Settings(**given)
    rank, n_processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # from torchrun
    share = slice(rank, None, n_processes)  # which sequences of each batch this process works on
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # the first process alone speaks and writes
    if not (s.resume and s.out_dir):
        shape = GPTConfig.paper(s.size, **model_flags) if s.size else GPTConfig(**model_flags)
    out_dir = Path(s.out_dir or Path("out", model_name(shape, s.size)))
    path = out_dir / "ckpt.pt"
    if s.resume:
        model, checkpoint = load_checkpoint(path)
        s = Settings(**checkpoint["settings"] | {"overwrite": False} | given)
    elif path.exists() and not s.overwrite:
        raise ValueError(f"{out_dir} holds a run: --resume goes on with it, --overwrite replaces it, --out_dir avoids it")
    device = pick_device(s.device)
    if n_processes > 1:
        device = join_processes(s, device, n_processes)
    dtype = pick_dtype(s.dtype, device)
    meta, train_data, val_data = load_dataset(Path("data", s.dataset))
    if s.resume:
        resumed(checkpoint, path, given, model_flags, meta)
        if checkpoint["iter"] >= s.max_iters:
            print(f"{out_dir}: all {checkpoint['iter']} steps are done, a larger --max_iters goes on")
            return
    else:
        torch.manual_seed(s.seed)
        model = GPT(dataclasses.replace(shape, vocab_size=meta["vocab_size"]))
    config = model.config
    for name, data in (("train.bin", train_data), ("val.bin", val_data)):
        if len(data) <= config.block_size:
            raise ValueError(
                f"{Path('data', s.dataset, name)} holds {len(data)} tokens, too few for one sequence of block_size "
                f"{config.block_size} and its next token"
            )

    step = checkpoint["iter"] if s.resume else 0
    seconds = checkpoint["seconds"] if s.resume else 0.0
    model.to(device)
    optimizer, scaler, autocast = step_tools(model, s, device, dtype)
    if s.resume:
        optimizer.load_state_dict(checkpoint["optimizer"])
        if checkpoint["scaler"] and scaler.is_enabled():
            scaler.load_state_dict(checkpoint["scaler"])
    tokens_per_step = s.batch_size * s.gradient_accumulation_steps * config.block_size
    where = f"{device}, {dtype}" + f", {n_processes} processes" * (n_processes > 1)
    print(f"{out_dir}: {model.num_params():,} parameters, {tokens_per_step:,} tokens per step, {where}")
    if s.compile:
        print("compiling (--compile=False starts at once)", flush=True)
        compile_model(model, *train_batch(train_data, s, config.block_size, step, device, share), s, autocast)
    parallel = model  # the model whose backward pass averages the gradients over all processes
    if n_processes > 1:
        parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    if rank == 0:
        out_dir.mkdir(parents=True, exist_ok=True)
    log_file = open_log(out_dir / "log.csv", step) if rank == 0 else open(os.devnull, "w")
    log = csv.writer(log_file)

    stop = await_signal()
    recent = []  # (loss, gradient norm) of the steps since the last log line, left on the device until then
    began, first, since = time.perf_counter(), step, time.perf_counter()
    stopping = False
    while step < s.max_iters and not stopping:
        lr = lr_at(step, s)
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = train_batch(train_data, s, config.block_size, step, device, share)
        recent.append(train_step(parallel, optimizer, scaler, x, y, s, autocast))
        step += 1
        if s.overwrite and step == 1 and rank == 0:  # the new run works, so the old one can go
            path.unlink(missing_ok=True)

        evaluating = step % s.eval_interval == 0 or step == s.max_iters
        stopping = sum_over_processes(stop.clone()).item() > 0
        if not (evaluating or stopping or step % s.log_interval == 0):
            continue
        logged = sum_over_processes(torch.stack(recent)) / n_processes
        for i, (loss, grad_norm) in enumerate(logged.tolist(), start=step - len(recent) + 1):
            # an infinite gradient under float16 is the scaler's business: it skips the step and lowers its scale
            if not math.isfinite(loss) or not (math.isfinite(grad_norm) or scaler.is_enabled()):
                raise ValueError(
                    f"step {i}: loss {loss}, gradient norm {grad_norm} at learning rate {lr_at(i - 1, s):.3g}. Try a lower "
                    f"--learning_rate, more --warmup_iters or --dtype=float32; the last checkpoint is kept"
                )
        now = time.perf_counter()
        seconds += now - since
        speed = tokens_per_step * len(recent) / (now - since)
        recent.clear()
        val_loss = val_bpb = ""
        line = f"iter {step:5}/{s.max_iters} | loss {loss:.4f}"
        if evaluating:
            val_loss = evaluate(model, val_data, s, config.block_size, device, autocast, share)
            val_bpb = val_loss / math.log(2) * meta["val"]["tokens"] / meta["val"]["bytes"]
            line += f" | val {val_loss:.4f} = {val_bpb:.4f} bits/byte"
        left = (time.perf_counter() - began) / (step - first) * (s.max_iters - step)
        try:
            print(f"{line} | {speed:,.0f} tokens/s | {left // 60:.0f}:{left % 60:02.0f} left", flush=True)
        except BrokenPipeError:  # whoever read along has left (`| head`); the training goes on
            sys.stdout = open(os.devnull, "w")
        log.writerow([step, step * tokens_per_step, loss, val_loss, val_bpb, lr, grad_norm, round(speed), round(seconds, 2)])
        log_file.flush()
        if (evaluating or stopping) and rank == 0:
            os.fsync(log_file.fileno())  # so that the log is never behind the checkpoint
            save_checkpoint(
                path, model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(), iter=step,
                seconds=seconds, settings=asdict(s), config=asdict(config), meta=meta,
            )  # fmt: skip
        since = time.perf_counter()
    print(f"peak memory {peak_memory(device) / 2**20:,.0f} MiB{' per process' * (n_processes > 1)}")
    if step < s.max_iters:
        print(f"stopped after step {step} of {s.max_iters}; go on with: python train.py --resume --out_dir {shlex.quote(str(out_dir))}")
        sys.exit(128 + (stop.item() or signal.SIGTERM))
    print(f"done: python sample.py --out_dir {shlex.quote(str(out_dir))}")


if __name__ == "__main__":
    run(main)
