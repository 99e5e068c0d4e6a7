"""
The quick test file: python -m pytest -q

The model is held against the paper's equations, written out below in plain tensor arithmetic, and against itself
where two ways to compute the same thing must agree.
"""

import csv
import gzip
import http.server
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bench
from model import GPT, LAMBDA_MODES, PAPER_SIZES, GPTConfig, KVCache, sample
from prepare_data import SHA256, get_encoding, load_dataset, prepare
from train import LOG_COLUMNS, Settings, load_checkpoint, lr_at, train_batch

torch.set_num_threads(1)  # for models as small as these, a second thread only waits
HERE = Path(__file__).parent
KINDS = [{}, {"shared_value": True}] + [{"value_residual": True, "lambda_mode": mode} for mode in LAMBDA_MODES]
GRID = [
    kind | {"n_kv_head": n_kv_head, "kv_share": kv_share}
    for kind, n_kv_head, kv_share in itertools.product(KINDS, (4, 2, 1), (1, 2, 3))
]


def name(settings):
    return "-".join(str(value) for value in settings.values()) or "transformer"


def make_model(**settings):
    """A small GPT with 8 layers, and weights and lambdas that are large enough for mistakes to show."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(block_size=24, vocab_size=31, n_layer=8, n_head=4, n_embd=32) | settings))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2 if p.dim() == 2 else 1.0)
    return model


def tokens(rows=2, columns=20):
    return torch.randint(0, 31, (rows, columns), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def all_logits(model, idx, cache=None):
    return model(idx, targets=idx, cache=cache)[0]


# --- the paper's equations, written out: one sequence and one head at a time, with no code of model.py ---


def paper_lambdas(model, n):
    """(lambda_{n,1}, lambda_{n,2}) of layer n out of N = 8, from the table of the variants."""
    mode, trained = model.config.lambda_mode, model.lambdas
    if mode in ("learnable", "plus"):
        first = trained.lambda_1[n - 2] if mode == "learnable" else trained.s * trained.a.exp()[n - 2] / trained.a.exp().sum()
        return first, trained.lambda_2[n - 2]
    return {"identity": (0.5, 0.5), "constant": (2, 1), "sparse": (5 if n in (6, 7, 8) else 0, 1)}[mode]


def paper_rope(x):
    """x (T, hd): the pair (x_i, x_{i + hd/2}) as a complex number, turned by t * theta_i."""
    half = x.shape[1] // 2
    theta = 10_000 ** (-torch.arange(half) / half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * torch.arange(len(x))[:, None] * theta)
    return torch.cat([turned.real, turned.imag], dim=1)


def paper_norm(x, weight):
    return x / (x.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * weight


@torch.no_grad()
def paper_logits(model, row, cross_layer=False):
    """The logits of one sequence. With cross_layer, layers n >= 2 attend to the keys [K_n, K_n] and values [V_n, V_1]."""
    config = model.config
    T, hd, nh, nkv = len(row), config.head_dim, config.n_head, config.kv_heads
    causal = torch.full((T, T), -math.inf).triu(1)
    h = model.embed.weight[row]
    for n, block in enumerate(model.blocks, start=1):
        x = paper_norm(h, block.norm_1.weight)
        rows = list(block.attn.qkv.weight.split(hd))  # W^Q, W^K, W^V: one (hd, n_embd) matrix per head, in this order
        q = [paper_rope(x @ rows.pop(0).T) for _ in range(nh)]
        if (n - 1) % config.kv_share == 0:  # the first layer of its group
            k = [paper_rope(x @ rows.pop(0).T) for _ in range(nkv)]
            if n == 1 or not config.shared_value:
                v = [x @ rows.pop(0).T for _ in range(nkv)]
            if n == 1:
                v_1 = v
            elif config.value_residual and not cross_layer:
                lambda_1, lambda_2 = paper_lambdas(model, n)
                v = [lambda_1 * first + lambda_2 * own for first, own in zip(v_1, v)]
        assert not rows  # no weights that are not used
        heads = []
        for i in range(nh):
            j = i * nkv // nh
            scores = q[i] @ k[j].T / math.sqrt(hd) + causal
            if cross_layer and n > 1:
                heads.append(torch.cat([scores, scores], 1).softmax(1) @ torch.cat([v[j], v_1[j]]))
            else:
                heads.append(scores.softmax(1) @ v[j])
        h = h + torch.cat(heads, 1) @ block.attn.proj.weight.T
        x = paper_norm(h, block.norm_2.weight)
        gate, up = block.ffn.gate_up.weight.chunk(2)
        x_gate = x @ gate.T
        h = h + (x_gate * torch.sigmoid(x_gate) * (x @ up.T)) @ block.ffn.down.weight.T
    return paper_norm(h, model.norm.weight) @ model.head.weight.T


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_model_is_the_papers_equations(kind):
    model, idx = make_model(**kind), tokens()
    expected = torch.stack([paper_logits(model, row) for row in idx])
    torch.testing.assert_close(all_logits(model, idx), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1]], ids=name)
def test_gqa_and_cla_are_the_equations_with_shared_heads(kind):
    model, idx = make_model(**kind, n_kv_head=2, kv_share=3), tokens()
    expected = torch.stack([paper_logits(model, row) for row in idx])
    torch.testing.assert_close(all_logits(model, idx), expected, atol=1e-4, rtol=1e-4)


def test_identity_is_cross_layer_attention():
    model, idx = make_model(value_residual=True, lambda_mode="identity"), tokens(1)
    expected = paper_logits(model, idx[0], cross_layer=True)
    torch.testing.assert_close(all_logits(model, idx)[0], expected, atol=1e-4, rtol=1e-4)


def test_lambda_0_1_is_the_transformer_and_1_0_the_svformer():
    idx, transformer, svformer = tokens(), make_model(), make_model(shared_value=True)
    constants = {"value_residual": True, "lambda_mode": "constant"}
    resformer = make_model(**constants, lambda_1=0, lambda_2=1)
    resformer.load_state_dict(transformer.state_dict())
    assert torch.equal(all_logits(resformer, idx), all_logits(transformer, idx))
    resformer = make_model(**constants, lambda_1=1, lambda_2=0)
    weights = resformer.state_dict()
    for key, value in svformer.state_dict().items():
        weights[key][: len(value)] = value  # W^V is the last part of qkv, and the SVFormer has none
    torch.testing.assert_close(all_logits(resformer, idx), all_logits(svformer, idx))


def test_lambdas_start_at_the_papers_values():
    with torch.no_grad():
        lambdas = {mode: GPT(GPTConfig(value_residual=True, lambda_mode=mode)).lambdas() for mode in LAMBDA_MODES}
    for mode in LAMBDA_MODES:
        assert list(lambdas[mode]) == [2, 3, 4, 5, 6, 7, 8]  # layer 1 has none
    assert [first for first, _ in lambdas["sparse"].values()] == [0, 0, 0, 0, 5, 5, 5]
    assert all((first, own) == (0.5, 0.5) for first, own in lambdas["learnable"].values())
    assert sum(first for first, _ in lambdas["plus"].values()).item() == pytest.approx(8)  # s starts at N


# --- the model as a whole ---


@pytest.mark.parametrize("size", PAPER_SIZES)
def test_parameter_counts_are_the_papers(size):
    with torch.device("meta"):
        model = GPT(GPTConfig.paper(size))
    assert f"{model.num_params() / 1e6:.0f}M" == size


def test_svformer_has_no_later_value_projections():
    transformer, svformer = make_model(), make_model(shared_value=True)
    assert transformer.num_params() - svformer.num_params() == 7 * 32 * 32


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_causality(kind):
    model, idx = make_model(**kind), tokens()
    changed = idx.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 31
    before, after = all_logits(model, idx), all_logits(model, changed)
    assert torch.equal(before[:, :12], after[:, :12]) and not torch.equal(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_layer_1_learns_from_the_layers_that_use_its_values(kind):
    """With layer 1's own output projection at zero, its W^V can only learn through the later layers."""
    model, idx = make_model(**kind), tokens()
    torch.nn.init.zeros_(model.blocks[0].attn.proj.weight)
    model(idx, targets=idx)[1].backward()
    of_values = model.blocks[0].attn.qkv.weight.grad[-32:]
    assert (of_values.abs().sum() > 0) == bool(kind)


def test_loss_is_the_mean_cross_entropy_and_ignores_minus_one():
    model, idx = make_model(), tokens()
    targets = idx.roll(-1, 1)
    targets[:, -1] = -1
    logits, loss = model(idx, targets)
    chosen = logits.log_softmax(-1)[:, :-1].gather(2, targets[:, :-1, None])
    torch.testing.assert_close(loss, -chosen.mean())
    last, none = model(idx)
    assert none is None
    torch.testing.assert_close(last, logits[:, -1:])


def test_only_matrices_are_decayed():
    for mode in ("learnable", "plus"):
        model = make_model(value_residual=True, lambda_mode=mode)
        decayed, free = model.optimizer(1e-3, (0.9, 0.95), 0.1).param_groups
        assert free["weight_decay"] == 0 and decayed["weight_decay"] == 0.1
        ids = {id(p) for p in free["params"]}
        assert all(id(p) in ids for p in [*model.lambdas.parameters(), model.norm.weight])
        assert sum(p.numel() for group in (decayed, free) for p in group["params"]) == model.num_params()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"n_embd": 30}, ["30", "4"]),
        ({"n_embd": 36}, ["9", "even"]),
        ({"n_kv_head": 3}, ["4", "3"]),
        ({"kv_share": 0}, ["kv_share", "0"]),
        ({"value_residual": True, "shared_value": True}, ["value_residual", "shared_value"]),
        ({"lambda_mode": "magic"}, ["magic", "learnable"]),
        ({"sparse_layers": (1, 8)}, ["1", "8"]),
        ({"n_layer": 0}, ["n_layer", "0"]),
    ],
)
def test_wrong_configurations_are_refused_with_their_numbers(settings, words):
    with pytest.raises(ValueError) as error:
        make_model(**settings)
    assert all(word in str(error.value) for word in words)


# --- the KV cache and generation ---


@pytest.mark.parametrize("settings", GRID, ids=name)
def test_cached_is_uncached(settings):
    model, idx = make_model(**settings), tokens()
    full = all_logits(model, idx)
    for chunks in ([20], [7, 1, 9, 3], [1] * 20):
        cache = KVCache(model.config, 2, 20)
        logits = torch.cat([all_logits(model, part, cache) for part in idx.split(chunks, dim=1)], dim=1)
        torch.testing.assert_close(logits, full, atol=1e-4, rtol=0)


@pytest.mark.parametrize("settings", GRID, ids=name)
def test_cache_stores_what_the_formula_says(settings):
    config = make_model(**settings).config
    groups = math.ceil(8 / config.kv_share)
    units = groups + 1 if config.shared_value else 2 * groups
    assert KVCache(config, 3, 20).nbytes == units * 3 * config.n_kv_head * 20 * 8 * 4
    half = KVCache(config, 3, 20, dtype=torch.bfloat16)
    assert half.nbytes == sum(t.untyped_storage().nbytes() for t in (*half.k, *half.v)) == units * 3 * config.n_kv_head * 20 * 16


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_greedy_generation_is_the_same_with_and_without_cache_also_past_block_size(kind):
    model, idx = make_model(**kind), tokens(2, 5)
    cached = model.generate(idx, 60, temperature=0)
    assert cached.shape == (2, 65) and torch.equal(cached[:, :5], idx)
    assert torch.equal(cached, model.generate(idx, 60, temperature=0, use_cache=False))
    longer = tokens(2, 40)  # only the last 24 are read
    assert torch.equal(model.generate(longer, 3, temperature=0)[:, 40:], model.generate(longer[:, 16:], 3, temperature=0)[:, 24:])


def test_nothing_is_left_on_the_model_by_a_call():
    model = make_model(value_residual=True)
    before = all_logits(model, tokens())
    model.generate(tokens(1, 9), 30)
    all_logits(model, tokens(5, 7))
    assert torch.equal(all_logits(model, tokens()), before)


def test_sampling_keeps_to_top_k_and_top_p():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(2000, 1)
    torch.manual_seed(0)
    assert set(sample(logits, 1.0, 2, None).flatten().tolist()) == {0, 1}
    assert set(sample(logits, 1.0, None, 0.6).flatten().tolist()) == {0, 1}
    assert set(sample(logits, 1.0, 99, 1.0).flatten().tolist()) == {0, 1, 2, 3}
    assert set(sample(logits, 1.0, None, 0.01).flatten().tolist()) == {0} == set(sample(logits, 0, None, None).flatten().tolist())
    share = (sample(logits, 0.5, None, None) == 0).float().mean().item()  # at temperature 1/2 probabilities are squared
    assert share == pytest.approx(0.25 / 0.365, abs=0.05)


@pytest.mark.parametrize(
    "arguments",
    [{"temperature": -1}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.1}, {"max_new_tokens": -1}],
)
def test_wrong_sampling_settings_are_refused(arguments):
    with pytest.raises(ValueError):
        make_model().generate(tokens(), **{"max_new_tokens": 1} | arguments)


def test_tokens_that_do_not_fit_are_refused_with_their_numbers():
    model = make_model()
    with pytest.raises(ValueError, match="25.*24"):
        model(tokens(1, 25))
    cache = KVCache(model.config, 2, 10)
    all_logits(model, tokens(2, 8), cache)
    with pytest.raises(ValueError, match="11.*10"):
        model(tokens(2, 3), cache=cache)
    with pytest.raises(ValueError, match="30"):
        model.generate(torch.tensor([[31]]), 1)
    with pytest.raises(ValueError):
        model.generate(torch.zeros(1, 0, dtype=torch.long), 1)


# --- the arithmetic of bench.py ---


@pytest.mark.parametrize("name", bench.MODELS)
def test_bench_counts_what_the_tensors_occupy(name):
    config = bench.model_config(name, "2M", 64)
    model, cache = GPT(config), KVCache(config, 3, 64)
    whole = KVCache(bench.model_config("Transformer", "2M", 64), 3, 64)
    assert cache.nbytes / whole.nbytes == bench.cache_ratio(config)
    read_or_written = [p for p in model.parameters() if p is not model.embed.weight]
    read_or_written += [model.embed.weight[:3], *(buffer[:, :, :11] for buffer in (*cache.k, *cache.v))]
    expected = sum(tensor.numel() * 4 for tensor in read_or_written)
    assert bench.decode_bytes(config, model.num_params(), batch_size=3, past=10, itemsize=4) == expected


def test_bench_ratios_are_the_papers():
    assert bench.cache_ratio(bench.model_config("SVFormer", "82M", 64)) == 0.5625
    assert bench.cache_ratio(bench.model_config("SVFormer + GQA + CLA", "82M", 64)) == 5 / 64
    assert bench.cache_ratio(bench.model_config("SVFormer", "468M", 64)) == 25 / 48
    assert [bench.sequences_that_fit(budget, 100, 10) for budget in (90, 109, 110, 155)] == [0, 0, 1, 5]


@pytest.mark.parametrize("settings", [{}, {"shared_value": True, "n_kv_head": 2, "kv_share": 2}], ids=name)
def test_bench_counts_the_operations_of_a_step(settings):
    model, idx = make_model(**settings), tokens(3, 24)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, targets=idx)[1].backward()
    hidden_half = 6 * 8 * 24 * 32 * 3 * 24  # the math backend computes all of A and masks what is not causal
    assert counter.get_total_flops() == bench.train_flops(model, 3, 24) + hidden_half


@pytest.mark.parametrize("kind", [{}, {"n_kv_head": 2, "value_residual": True}], ids=name)
@torch.no_grad()
def test_bench_measures_the_papers_attention_concentration(kind):
    model, row = make_model(**kind), tokens(1, 12)[0]
    T, hd, nkv = 12, model.config.head_dim, model.config.kv_heads
    x = paper_norm(model.embed.weight[row], model.blocks[0].norm_1.weight)
    rows = model.blocks[0].attn.qkv.weight.split(hd)
    importance = torch.zeros(T)
    for i in range(4):
        scores = paper_rope(x @ rows[i].T) @ paper_rope(x @ rows[4 + i * nkv // 4].T).T / math.sqrt(hd)
        importance += (scores + torch.full((T, T), -math.inf).triu(1)).softmax(1).sum(0) / (4 * T)
    v = torch.cat([x @ rows[4 + nkv + j].T for j in range(nkv)], 1).norm(dim=1)
    h = model.hidden(row[None], (model.cos[:T], model.sin[:T]), None, None)[0]  # behind the last layer
    cosines = [F.cosine_similarity(h[i], h[j], dim=0).item() for i in range(T) for j in range(T) if i != j]
    measured = bench.concentration(model, row[None])
    entropy = -(importance * importance.log()).sum()
    torch.testing.assert_close(measured[:3, 0], torch.stack([entropy, importance[0], v[0] / v[1:].mean()]))
    last = torch.tensor([h[0].norm() / h[1:].norm(dim=1).mean(), sum(cosines) / len(cosines)])
    torch.testing.assert_close(measured[3:, -1], last)


def test_bench_compares_runs_by_seed(work, capsys):
    """Runs that are made up: of two learning rates with two seeds each, the second reaches losses 0.1 and 0.3 lower."""
    checkpoint = torch.load(work / "out" / "resformer" / "ckpt.pt")
    runs = []
    for rate, losses in ((0.1, (3.0, 4.0)), (0.2, (2.9, 3.7))):
        for seed, last in enumerate(losses):
            runs.append(work / "out" / f"made-{rate}-{seed}")
            runs[-1].mkdir()
            checkpoint["settings"] |= {"seed": seed, "learning_rate": rate}
            torch.save(checkpoint, runs[-1] / "ckpt.pt")
            with open(runs[-1] / "log.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, LOG_COLUMNS)
                writer.writeheader()
                for part, loss in ((0.5, last + 0.4), (1.0, last)):
                    row = {"iter": 60 * part, "tokens": 1e6 * part, "tokens_per_s": 100 / rate}
                    row["seconds"] = round(checkpoint["seconds"], 2)
                    writer.writerow(row | dict.fromkeys(("train_loss", "val_loss", "val_bpb"), loss))
    bench.loss([*map(str, runs), "--csv", str(work / "runs.csv")])
    table = capsys.readouterr().out.splitlines()
    difference, margin = bench.confidence([-0.1, -0.3])
    assert difference == pytest.approx(-0.2) and margin == pytest.approx(12.706 * 0.1)  # t for one degree of freedom
    saved = (0.5 * 0.1 / 0.4 + 0.5 * 0.3 / 0.4) / 2  # on straight lines from 0.5M to 1M tokens
    for words in ("made-0.2", "(2.9000..3.7000)", f"{difference:+.4f} ± {margin:.4f}", f"{saved:.1%}", "0.50x"):
        assert words in table[3]
    made = [bench.Run(run) for run in runs]
    assert bench.relative_curve([(made[2], made[0]), (made[3], made[1])], window=2) == [(60, pytest.approx(difference))]
    checkpoint["settings"]["eval_iters"] += 1  # validated on other windows, which is not compared
    torch.save(checkpoint, runs[3] / "ckpt.pt")
    bench.loss([str(runs[1]), str(runs[3])])
    assert [cell.strip() for cell in capsys.readouterr().out.splitlines()[3].split("|")[-4:-1]] == ["-"] * 3
    with pytest.raises(ValueError, match=f"two runs are called {runs[0].name}"):  # one seed is not two
        bench.loss([str(runs[0]), str(runs[0])])
    bench.loss([str(runs[0]), "--csv", str(work / "runs.csv")])  # rows of other runs stay
    with open(work / "runs.csv", newline="") as file:
        assert [(row["run"], float(row["val_loss"])) for row in csv.DictReader(file)] == [
            (run.name, loss) for run, loss in zip(runs, (3.0, 4.0, 2.9, 3.7))
        ]
    lines = (runs[0] / "log.csv").read_text().splitlines()
    ends = (lines[-1].replace("3.0", "x"), lines[-1][:12], lines[-1] + "1")  # the last one is of a run that took longer
    for damage in ([], lines[1:], lines[:-1], [*lines, *lines[1:]], *([*lines[:-1], end] for end in ends)):
        (runs[0] / "log.csv").write_text("\n".join(damage))
        with pytest.raises(ValueError, match="damaged"):
            bench.loss([str(runs[0])])


def test_a_plot_without_matplotlib_is_refused_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # an import of it then fails
    with pytest.raises(ValueError, match="pip install matplotlib"):
        bench.check_files(plot=tmp_path / "figure.png")


# --- data, training and sampling, as a user runs them ---

TEXTS = ["plain text\n", "a\r\nb\0c", "naïve 日本語 🙂 שלום", "<|endoftext|> typed", " " * 50 + "x" * 9000, "def f():\n    return 1\n"]


@pytest.fixture(params=["bytes", "gpt2"])
def encoding(request):
    try:
        return get_encoding(request.param)
    except ValueError as error:  # no vocabulary and no network
        pytest.skip(str(error))


def test_every_document_comes_back_from_the_data_exactly(encoding, tmp_path):
    rng = np.random.default_rng(0)
    points = [c for c in range(0x3000) if not 0xD800 <= c < 0xE000]
    texts = TEXTS * 3 + ["".join(map(chr, rng.choice(points, 300))) for _ in range(12)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "texts.jsonl").write_text(lines, encoding="utf-8")
    meta, *splits = load_dataset(prepare([tmp_path / "texts.jsonl"], encoding=encoding.name, out_dir=tmp_path / "data"))
    found = []
    for split, ids in zip(("train", "val"), splits):
        assert ids.dtype == np.uint16 and len(ids) == meta[split]["tokens"]
        ends = np.flatnonzero(ids == encoding.eot_token)
        documents = [encoding.decode_bytes(part.tolist()).decode() for part in np.split(ids, ends)]
        documents = [documents[0], *(text.removeprefix("<|endoftext|>") for text in documents[1:])]
        assert len(documents) == meta[split]["documents"]
        assert sum(len(text.encode()) for text in documents) == meta[split]["bytes"]
        found += documents
    assert sorted(found) == sorted(texts)


def test_one_document_is_cut_at_nine_tenths_and_many_are_split_at_their_mark(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"0123456789" * 100)
    meta, train, val = load_dataset(prepare([tmp_path / "one.txt"], out_dir=tmp_path))
    assert bytes(train.astype(np.uint8)) == b"0123456789" * 90 and bytes(val.astype(np.uint8)) == b"0123456789" * 10
    (tmp_path / "two.txt").write_text("first<|endoftext|>second")
    meta, train, val = load_dataset(prepare([tmp_path / "two.txt"], out_dir=tmp_path))
    assert {bytes(ids.astype(np.uint8)) for ids in (train, val)} == {b"first", b"second"}


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.txt", b"", "no text"),
        ("a.txt", b"fine \xff", "byte 5"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2"),
        ("a.txt.gz", gzip.compress(b"abc" * 1000)[:-9], "not a whole one"),
        ("a.png", b"x", "a.png"),
    ],
)
def test_bad_text_is_refused_and_the_dataset_before_it_kept(name, content, words, tmp_path):
    (tmp_path / "good.txt").write_bytes(b"good text" * 10)
    (tmp_path / name).write_bytes(content)
    folder = prepare([tmp_path / "good.txt"], name="kept", out_dir=tmp_path / "data")
    before = [path.read_bytes() for path in sorted(folder.iterdir())]
    with pytest.raises(ValueError, match=words):
        prepare([tmp_path / name], name="kept", out_dir=tmp_path / "data")
    assert [path.read_bytes() for path in sorted(folder.iterdir())] == before
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["kept"]


def test_a_download_ends_up_whole_or_not_at_all(tmp_path, monkeypatch):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = {"/page.txt": b" <!DOCTYPE html><html>log in"}.get(self.path, b"some text " * 10)
            self.send_response(404 if self.path == "/missing.txt" else 200)
            self.send_header("Content-Length", str(len(body) + (5 if self.path == "/short.txt" else 0)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setitem(SHA256, f"{url}/hash.txt", "0" * 64)
        for name in ("missing.txt", "page.txt", "short.txt", "hash.txt"):
            with pytest.raises(OSError, match=name):
                prepare([f"{url}/{name}"], out_dir=tmp_path)
            assert not list(tmp_path.rglob("*.*"))
        meta, train, val = load_dataset(prepare([f"{url}/good.txt"], out_dir=tmp_path))
        assert len(train) == 90 and len(val) == 10
        server.shutdown()


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("val.bin", b"\0\0\0", "val.bin has 3 bytes"),
        ("train.bin", b"\xff" * 180, "65535"),
        ("meta.json", b"{}", "meta.json"),
        ("meta.json", b"GIF89a", "meta.json"),
    ],
)
def test_damaged_datasets_are_refused(name, content, words, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456789" * 10)
    folder = prepare([tmp_path / "a.txt"], out_dir=tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load_dataset(folder)


def test_a_batch_depends_on_seed_and_step_alone():
    data, cpu = np.arange(10_000, dtype=np.uint16), torch.device("cpu")
    x, y = train_batch(data, Settings(seed=1), 32, 5, cpu)
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(y, x + 1)
    again, _ = train_batch(data, Settings(seed=1, learning_rate=1.0), 32, 5, cpu)
    assert torch.equal(x, again)
    for seed, step in ((1, 6), (2, 5)):
        assert not torch.equal(x, train_batch(data, Settings(seed=seed), 32, step, cpu)[0])
    parts, _ = train_batch(data, Settings(seed=1, batch_size=4, gradient_accumulation_steps=4), 32, 5, cpu)
    assert torch.equal(x, parts)


def test_learning_rate_warms_up_and_ends_at_a_tenth():
    s = Settings(learning_rate=1.0, warmup_iters=10, max_iters=110)
    assert [lr_at(step, s) for step in (0, 9, 10, 60, 110)] == pytest.approx([0.1, 1.0, 1.0, 0.55, 0.1])


def command(folder, script, *arguments, processes=1):
    """Start a script in `folder` as a user would, on one thread; with more processes, as torchrun does."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] * (processes > 1)
    return subprocess.Popen(
        [sys.executable, *torchrun, str(HERE / f"{script}.py"), *map(str, arguments)], cwd=folder, text=True,
        encoding="utf-8", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "LC_ALL": "C"},
    )  # fmt: skip


def finish(process, status=0):
    """Wait for a command, check its exit status and that it shows no traceback. Returns (output, errors)."""
    output, errors = process.communicate()
    assert process.returncode == status and "Traceback" not in errors, output + errors
    return output, errors


def log(run):
    with open(run / "log.csv", newline="") as file:
        return list(csv.DictReader(file))


SMALL = ["--dataset=code", "--n_layer=2", "--n_embd=32", "--block_size=32", "--batch_size=8", "--warmup_iters=5",
         "--learning_rate=1e-2", "--eval_iters=2", "--log_interval=5", "--compile=False", "--device=cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with data/code and out/resformer, a small ResFormer that was trained on it for 60 steps."""
    folder = tmp_path_factory.mktemp("work")
    prepare([HERE / "model.py", HERE / "train.py"], name="code", out_dir=folder / "data")
    finish(command(folder, "train", *SMALL, "--value_residual", "--max_iters=60", "--eval_interval", 20))
    return folder


def test_training_lowers_the_loss(work):
    rows = log(work / "out" / "resformer")
    assert [int(row["iter"]) for row in rows] == list(range(5, 61, 5))
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"]) - 0.5
    val_losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert len(val_losses) == 3 and val_losses[2] < val_losses[0] < math.log(257)


def test_a_killed_run_resumes_bit_for_bit(work):
    run = work / "out" / "killed"
    start = [*SMALL, "--value_residual", "--max_iters=60", "--eval_interval=20", "--out_dir", run]
    process = command(work, "train", *start)
    while process.poll() is None and not (run / "ckpt.pt").exists():
        time.sleep(0.01)
    process.kill()
    process.communicate()
    finish(command(work, "train", *start), status=1)  # a run is not replaced by mistake
    finish(command(work, "train", "--resume", "--n_layer=3", "--out_dir", run), status=1)
    finish(command(work, "train", "--resume", "--out_dir", run))
    columns = ["iter", "tokens", "train_loss", "val_loss", "val_bpb", "lr", "grad_norm"]
    whole, resumed = ([[row[c] for c in columns] for row in log(work / "out" / name)] for name in ("resformer", "killed"))
    assert resumed == whole


def test_two_processes_train_as_one(work):
    batch = ["--batch_size=6", "--gradient_accumulation_steps=3", "--max_iters=20", "--eval_interval=10", "--eval_iters=3"]
    for n in (1, 2):
        run = work / "out" / f"{n}-process"
        finish(command(work, "train", *SMALL, *batch, "--value_residual", "--out_dir", run, processes=n))
    one, two = (log(work / "out" / f"{n}-process") for n in (1, 2))
    assert len(one) == len(two) == 4
    for column in ("iter", "train_loss", "val_loss", "grad_norm"):
        expected, found = ([float(row[column]) for row in rows if row[column]] for rows in (one, two))
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_its_checkpoint(work):
    run = work / "out" / "diverged"
    finish(command(work, "train", *SMALL, "--max_iters=10", "--eval_interval=10", "--out_dir", run))
    before = (run / "ckpt.pt").read_bytes()
    resume = ["--resume", "--max_iters=30", "--learning_rate=1e30", "--grad_clip=0", "--out_dir", run]
    _, errors = finish(command(work, "train", *resume), status=1)
    assert "--learning_rate" in errors and (run / "ckpt.pt").read_bytes() == before


def test_sigterm_saves_and_says_how_to_go_on(work):
    run = work / "out" / "stopped"
    process = command(work, "train", *SMALL, "--max_iters=100000", "--log_interval=1", "--out_dir", run)
    for line in process.stdout:
        if line.startswith("iter"):
            break
    process.send_signal(signal.SIGTERM)
    output, errors = finish(process, status=128 + signal.SIGTERM)
    assert f"--resume --out_dir {run}" in output
    assert torch.load(run / "ckpt.pt", weights_only=True)["iter"] == int(log(run)[-1]["iter"])


def test_a_checkpoint_alone_is_enough_to_sample(work):
    arguments = ["--out_dir", work / "out" / "resformer", "--prompt", "déf", "--max_new_tokens=80", "--num_samples=2"]
    first, errors = finish(command(HERE, "sample", *arguments))
    assert first.count("déf") == 2 and "tokens/s" in errors
    assert finish(command(HERE, "sample", *arguments))[0] == first  # the seed reproduces
    finish(command(HERE, "sample", *arguments, "--temperature=nan"), status=1)


def test_what_is_no_checkpoint_is_refused_and_not_run(work):
    class Code:
        def __reduce__(self):
            return open, (str(work / "code-was-run"), "w")

    for content in (b"<html>", (work / "out" / "resformer" / "ckpt.pt").read_bytes()[:5000], {"a": torch.ones(2)}, Code()):
        (work / "out" / "bad").mkdir(exist_ok=True)
        path = work / "out" / "bad" / "ckpt.pt"
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        with pytest.raises(ValueError, match="not a checkpoint"):
            load_checkpoint(path)
    assert not (work / "code-was-run").exists()


def test_mistakes_on_the_command_line_get_one_line(work):
    for script, arguments, status, words in [
        ("train", ["--value_residul"], 2, "--value_residual"),
        ("train", ["--n_head=3"], 1, "128"),
        ("train", ["--dataset=nothing"], 1, "prepare_data.py"),
        ("train", ["--lambda_mode=plus"], 1, "--value_residual"),
        ("prepare_data", ["--input", "missing.txt"], 1, "missing.txt"),
        ("sample", ["--out_dir", "nowhere"], 1, "nowhere"),
    ]:
        _, errors = finish(command(work, script, *arguments), status)
        assert errors.count("\n") == 1 and words in errors
