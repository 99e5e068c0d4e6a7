"""
A GPT with value residuals, in one file, after "Value Residual Learning" (Zhou et al., arXiv 2410.17897).

Layers are counted from 1, as in the paper. With A_n = softmax(Q_n K_n^T / sqrt(head_dim)) under a causal mask,
the attention of layer n returns, before its output projection,

    Transformer                        A_n V_n
    ResFormer    value_residual=True   A_n V'_n   with V'_n = lambda_{n,1} V_1 + lambda_{n,2} V_n   for n >= 2
    SVFormer     shared_value=True     A_n V_1    with no W^V at all in the layers n >= 2

The rest is the paper's Llama-like decoder: RMSNorm before each sublayer, RoPE, SwiGLU, an untied head, no biases
and no dropout. All three combine with GQA (n_kv_head) and CLA (kv_share) and use the same KV cache.

Shape comments: B batch, T new tokens, S all tokens in sight, hd head width, nh query heads, nkv key/value heads.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

PAPER_SIZES = {"2M": (4, 2, 16), "82M": (8, 8, 512), "180M": (12, 12, 768), "468M": (24, 16, 1024)}

LAMBDA_MODES = {  # ResFormer variant: its (lambda_{n,1}, lambda_{n,2}), or where their training starts
    "identity": (0.5, 0.5),
    "constant": (2.0, 1.0),
    "sparse": (5.0, 1.0),  # lambda_{n,1} is 0 in the other layers
    "learnable": (0.5, 0.5),  # both are trained, in each layer
    "plus": (None, 0.5),  # both are trained; lambda_{n,1} = s * softmax(a)_n, s starts at the number of layers with a V
}


def setting(default, help):
    """A dataclass field whose comment is also the help text of the command-line flag made from it."""
    return field(default=default, metadata={"help": help})


@dataclass
class GPTConfig:
    """
    The shape of a model. The defaults are a small byte-level model that trains on a laptop's CPU.
    Raises ValueError, with the numbers in it, if the settings do not fit together.
    """

    block_size: int = setting(256, "context length in tokens")
    vocab_size: int = setting(257, "number of token ids")
    n_layer: int = setting(8, "number of layers")
    n_head: int = setting(2, "query heads per layer")
    n_embd: int = setting(128, "width of the hidden states")
    n_ffn: int | None = setting(None, "width inside the SwiGLU (default: 3.5 x n_embd)")
    n_kv_head: int | None = setting(None, "key and value heads per layer, GQA of arXiv 2305.13245 (default: n_head)")
    kv_share: int = setting(1, "neighbouring layers that share one K and V, CLA of arXiv 2405.12981")
    value_residual: bool = setting(False, "ResFormer: later layers mix the first layer's values into their own")
    shared_value: bool = setting(False, "SVFormer: all layers use the first layer's values")
    lambda_mode: str = setting("learnable", f"ResFormer variant: {', '.join(LAMBDA_MODES)}")
    lambda_1: float | None = setting(None, "weight of V_1, or its start; in mode plus that of s (default: the paper's)")
    lambda_2: float | None = setting(None, "weight of V_n, or its start (default: the paper's)")
    sparse_layers: tuple[int, ...] | None = setting(None, "layers that mix in mode sparse (default: the last 3/8)")

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "n_ffn", "n_kv_head", "kv_share"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        if self.head_dim % 2:
            raise ValueError(f"RoPE turns pairs of numbers: n_embd / n_head = {self.head_dim} must be even")
        if self.n_head % self.kv_heads:
            raise ValueError(f"n_head {self.n_head} is not divisible by n_kv_head {self.kv_heads}")
        if self.value_residual and self.shared_value:
            raise ValueError("value_residual (ResFormer) and shared_value (SVFormer) exclude each other")
        if self.lambda_mode not in LAMBDA_MODES:
            raise ValueError(f"unknown lambda_mode {self.lambda_mode!r}: choose from {', '.join(LAMBDA_MODES)}")
        if not all(math.isfinite(value or 0) for value in (self.lambda_1, self.lambda_2)):
            raise ValueError(f"lambda_1 {self.lambda_1} and lambda_2 {self.lambda_2} must be finite")
        if not set(self.sparse_layers or ()) <= set(self.kv_layers[1:]):
            raise ValueError(f"sparse_layers {self.sparse_layers} must be among {list(self.kv_layers[1:])}")

    @classmethod
    def paper(cls, size, **changes):
        """A size of the paper ("2M", "82M", "180M", "468M") with its vocabulary and context; `changes` override fields."""
        if size not in PAPER_SIZES:
            raise ValueError(f"unknown size {size!r}: choose from {', '.join(PAPER_SIZES)}")
        n_layer, n_head, n_embd = PAPER_SIZES[size]
        return cls(**dict(block_size=2048, vocab_size=50277, n_layer=n_layer, n_head=n_head, n_embd=n_embd) | changes)

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def kv_heads(self):
        return self.n_kv_head or self.n_head

    @property
    def kv_layers(self):
        """The layers that compute K, and V unless SVFormer reads V_1: every layer, or with CLA the first of each group."""
        return range(1, self.n_layer + 1, self.kv_share)


class KVCache:
    """
    The keys and values of the tokens so far, in buffers allocated once: k[i] and v[i], each (batch_size, n_kv_head,
    max_len, head_dim), belong to layer i + 1, or with CLA to group i. SVFormer stores a single V, that of layer 1.
    ResFormer stores V'_n, already mixed, so it takes no more than the Transformer. For inference: not differentiable.
    """

    def __init__(self, config, batch_size, max_len, device=None, dtype=None):
        n_k = len(config.kv_layers)
        n_v = 1 if config.shared_value else n_k
        shape = (batch_size, config.kv_heads, max_len, config.head_dim)
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(n_k)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(n_v)]
        self.batch_size, self.max_len = batch_size, max_len
        self.length = 0  # tokens stored so far; GPT.forward moves it on when its last layer is done

    @property
    def nbytes(self):
        """Bytes in use: (n_k + n_v) x batch_size x n_kv_head x max_len x head_dim x bytes per number."""
        return sum(buffer.nbytes for buffer in (*self.k, *self.v))

    def append(self, buffer, new):
        """Write `new` (B, nkv, T, hd) behind the tokens in `buffer` and return all of them (B, nkv, S, hd), as a view."""
        end = self.length + new.shape[2]
        buffer[:, :, self.length : end] = new.detach()
        return buffer[:, :, :end]


class Lambdas(nn.Module):
    """The ResFormer's lambda_{n,1} and lambda_{n,2} for the layers n >= 2 that compute values, trained or constant."""

    def __init__(self, config):
        super().__init__()
        self.layers = config.kv_layers[1:]
        self.mode = config.lambda_mode
        lambda_1, lambda_2 = LAMBDA_MODES[self.mode]
        lambda_1 = len(config.kv_layers) if lambda_1 is None else lambda_1
        lambda_1 = float(lambda_1 if config.lambda_1 is None else config.lambda_1)
        lambda_2 = float(lambda_2 if config.lambda_2 is None else config.lambda_2)
        self.lambda_1 = [lambda_1] * len(self.layers)
        self.lambda_2 = [lambda_2] * len(self.layers)
        if self.mode == "sparse":
            first = len(config.kv_layers) - round(len(config.kv_layers) * 3 / 8)
            chosen = config.kv_layers[first:] if config.sparse_layers is None else config.sparse_layers
            self.lambda_1 = [lambda_1 if n in chosen else 0.0 for n in self.layers]
        elif self.mode == "learnable":
            self.lambda_1 = nn.Parameter(torch.tensor(self.lambda_1))
            self.lambda_2 = nn.Parameter(torch.tensor(self.lambda_2))
        elif self.mode == "plus":
            self.s = nn.Parameter(torch.tensor(lambda_1))
            self.a = nn.Parameter(torch.zeros(len(self.layers)))
            self.lambda_2 = nn.Parameter(torch.tensor(self.lambda_2))

    def forward(self):
        """Return {n: (lambda_{n,1}, lambda_{n,2})}."""
        lambda_1 = self.s * self.a.softmax(0) if self.mode == "plus" else self.lambda_1
        return dict(zip(self.layers, zip(lambda_1, self.lambda_2)))


def apply_rope(x, cos, sin):
    """
    Turn each pair (x_i, x_{i + hd/2}) of x (B, T, heads, hd) by its position's angle (RoPE, arXiv 2104.09864).
    cos, sin: (T, 1, hd), the signs of the rotation being part of sin.
    """
    return x * cos.to(x.dtype) + x.roll(x.shape[-1] // 2, dims=-1) * sin.to(x.dtype)


class Linear(nn.Linear):
    """W x. For the few rows of a batch that decodes, a CPU is two to three times as fast at (W x^T)^T as at x W^T."""

    def forward(self, x):
        few = x.device.type == "cpu" and 2 <= x.numel() // x.shape[-1] <= 16 and self.weight.is_contiguous()
        return (self.weight @ x.flatten(0, -2).t()).t().reshape(*x.shape[:-1], -1) if few else super().forward(x)


class Attention(nn.Module):
    """
    Causal self-attention of layer n, returning A_n V_n, A_n V'_n or A_n V_1 through the output projection.

    A layer without keys or values of its own uses those it is handed, which is all there is to CLA (the group's first
    layer made them) and to the SVFormer (layer 1 made the values). So it has no weights for what it does not compute.
    """

    def __init__(self, config, n):
        super().__init__()
        self.group = (n - 1) // config.kv_share
        self.nh, self.hd = config.n_head, config.head_dim
        self.nk = config.kv_heads if n in config.kv_layers else 0  # heads of W^K
        self.nv = 0 if config.shared_value and n > 1 else self.nk  # heads of W^V
        # W^Q, W^K and W^V in one matrix, since one large product is faster than three small ones
        self.qkv = Linear(config.n_embd, (self.nh + self.nk + self.nv) * self.hd, bias=False)
        self.proj = Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, k, v, v_1, lambdas, rope, mask, cache):
        B, T, C = x.shape
        qk, v_n = self.qkv(x).view(B, T, -1, self.hd).split([self.nh + self.nk, self.nv], dim=2)
        q, k_n = apply_rope(qk, *rope).transpose(1, 2).split([self.nh, self.nk], dim=1)  # (B, nh or nk, T, hd)
        if self.nk:
            k = k_n if cache is None else cache.append(cache.k[self.group], k_n)  # (B, nkv, S, hd)
        if self.nv:
            v_n = v_n.transpose(1, 2)  # (B, nkv, T, hd)
            if v_1 is None:
                v_1 = v_n  # layer 1; not detached, so that it learns from all the layers that use it
            if lambdas is not None:
                v_n = lambdas[0] * v_1 + lambdas[1] * v_n  # V'_n of the ResFormer
            v = v_n if cache is None else cache.append(cache.v[self.group], v_n)  # (B, nkv, S, hd)
        if T == 1:  # one new token sees everything; the query heads that share a key head are its rows
            y = F.scaled_dot_product_attention(q.view(B, k.shape[1], -1, self.hd), k, v, mask)  # (B, nkv, nh / nkv, hd)
        else:
            gqa = k.shape[1] != self.nh
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=gqa)  # (B, nh, T, hd)
            y = y.transpose(1, 2)
        return self.proj(y.reshape(B, T, C)), k, v, v_1


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), arXiv 2002.05202; gate and up are one matrix."""

    def __init__(self, config):
        super().__init__()
        n_ffn = config.n_ffn or int(3.5 * config.n_embd)
        self.gate_up = Linear(config.n_embd, 2 * n_ffn, bias=False)
        self.down = Linear(n_ffn, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B, T, n_ffn)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Layer n: attention and SwiGLU, each behind an RMSNorm and added to the hidden state."""

    def __init__(self, config, n):
        super().__init__()
        self.norm_1 = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.attn = Attention(config, n)
        self.norm_2 = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.ffn = SwiGLU(config)

    def forward(self, x, k, v, v_1, lambdas, rope, mask, cache):
        y, k, v, v_1 = self.attn(self.norm_1(x), k, v, v_1, lambdas, rope, mask, cache)
        x = x + y
        return x + self.ffn(self.norm_2(x)), k, v, v_1


class GPT(nn.Module):
    """The language model: Transformer, ResFormer or SVFormer, as `config` (a GPTConfig) says."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, n) for n in range(1, config.n_layer + 1))
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.lambdas = Lambdas(config) if config.value_residual else None
        # RoPE: position t turns pair i by t * 10,000^(-2i / hd)
        speed = 10_000.0 ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.outer(torch.arange(config.block_size), speed)[:, None]  # (block_size, 1, hd / 2)
        self.register_buffer("cos", torch.cat([angle.cos(), angle.cos()], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], dim=-1), persistent=False)
        # GPT-2's initialisation: matrices that write to the hidden state start smaller, the deeper the model
        for name, p in self.named_parameters():
            if p.dim() == 2:
                writes = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if writes else 0.02)

    def num_params(self):
        """The number of parameters, embedding and head included."""
        return sum(p.numel() for p in self.parameters())

    def forward(self, idx, targets=None, cache=None):
        """
        idx: token ids (B, T). Returns (logits, loss).
        With targets (B, T), where -1 is ignored: the logits of all positions (B, T, vocab_size) and the mean
        cross-entropy in nats. Without: the logits of the last position (B, 1, vocab_size) and None.
        With a KVCache the tokens continue those that it holds, and it holds them too afterwards.
        Raises ValueError if they do not fit into block_size or the cache. Ids are not checked here, but where they
        enter: in `generate`, and when training data is opened.
        """
        B, T = idx.shape
        past = 0 if cache is None else cache.length
        if past + T > self.config.block_size:
            raise ValueError(f"{past + T} tokens do not fit into block_size {self.config.block_size}")
        if cache is not None and (past + T > cache.max_len or B != cache.batch_size):
            raise ValueError(f"{B} x {past + T} tokens do not fit a cache of {cache.batch_size} x {cache.max_len}")
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f"targets {tuple(targets.shape)} must have the shape of idx {(B, T)}")
        rope = self.cos[past : past + T], self.sin[past : past + T]
        mask = None  # causal; only a chunk behind cached tokens needs the mask spelled out
        if past and T > 1:
            mask = torch.ones(T, past + T, dtype=torch.bool, device=idx.device).tril(past)
        x = self.hidden(idx, rope, mask, cache)  # (B, T, n_embd)
        if cache is not None:
            cache.length += T
        if targets is None:
            return self.head(self.norm(x[:, -1:])), None
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def hidden(self, idx, rope, mask, cache):
        """The hidden states (B, T, n_embd) behind the last layer; rope: cos and sin of idx's positions, (T, 1, hd)."""
        lambdas = self.lambdas() if self.config.value_residual else {}
        x = self.embed(idx)  # (B, T, n_embd)
        k = v = v_1 = None  # what the next layer may use: the latest keys and values, and layer 1's values
        for n, block in enumerate(self.blocks, start=1):
            x, k, v, v_1 = block(x, k, v, v_1, lambdas.get(n), rope, mask, cache)
        return x

    def optimizer(self, learning_rate, betas, weight_decay):
        """AdamW that decays the matrices only: no norm weight and no lambda."""
        groups = [
            {"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = self.head.weight.device.type in ("cpu", "cuda")
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=True):
        """Return idx (B, T) with max_new_tokens sampled ids behind it. The arguments and errors are those of `stream`."""
        new = list(self.stream(idx, max_new_tokens, temperature, top_k, top_p, use_cache))
        return torch.cat([idx, *new], dim=1)

    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=True):
        """
        Yield max_new_tokens ids (B, 1), each as soon as it is sampled behind idx (B, T).

        temperature 0 is greedy; top_k keeps the k likeliest ids, top_p the likeliest that together reach that
        probability (nucleus sampling, arXiv 1904.09751). A prompt longer than block_size is cut from the left. When
        the context is full, its older half is dropped and the newer half read again as a new context, with and
        without the cache alike: so both give the same ids, and a token costs the same however long the text gets.
        Raises ValueError for ids outside the vocabulary, an empty idx, or settings outside their range.
        """
        vocab_size = self.config.vocab_size
        if idx.dim() != 2 or idx.numel() == 0 or idx.min() < 0 or idx.max() >= vocab_size:
            raise ValueError(f"idx must be (B, T) with T at least 1, and hold only ids from 0 to {vocab_size - 1}")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, not {max_new_tokens}")
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, not {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
        return self._stream(idx, max_new_tokens, temperature, top_k, top_p, use_cache)

    @torch.no_grad()
    def _stream(self, idx, max_new_tokens, temperature, top_k, top_p, use_cache):
        block_size = self.config.block_size
        context = new = idx[:, -block_size:]
        cache = None
        if use_cache:
            max_len = min(block_size, context.shape[1] + max_new_tokens)
            cache = KVCache(self.config, len(idx), max_len, idx.device, self.embed.weight.dtype)
        for _ in range(max_new_tokens):
            if context.shape[1] > block_size:
                context = new = context[:, -((block_size + 1) // 2) :]
                if use_cache:
                    cache.length = 0
            logits, _ = self(new if use_cache else context, cache=cache)
            new = sample(logits[:, -1].float(), temperature, top_k, top_p)
            context = torch.cat([context, new], dim=1)
            yield new


def sample(logits, temperature, top_k, top_p):
    """Draw one id (B, 1) from the distribution that logits (B, vocab_size) and the settings of GPT.stream make."""
    if temperature < 1e-8:  # also keeps the division below finite
        return logits.argmax(-1, keepdim=True)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        ranked, order = probs.sort(descending=True, dim=-1)
        ranked = ranked.masked_fill(ranked.cumsum(-1) - ranked >= top_p, 0.0)  # the likeliest id always stays
        probs = torch.zeros_like(probs).scatter(-1, order, ranked)
    return torch.multinomial(probs, 1)


def store_by_columns(model):
    """
    Store the matrices that have more outputs than inputs column by column, which changes no result: most CPUs' W x then
    runs along the longer side of W, for a single x about twice as fast.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.out_features > layer.in_features:
            layer.weight.data = layer.weight.data.t().contiguous().t()
