"""
Write text with a trained model, streaming it as it comes:

    python sample.py                                  the run trained last, from an empty prompt
    python sample.py --out_dir out/svformer --prompt "def main"
    cat start.py | python sample.py --temperature 0
"""

import codecs
import sys
import time
from pathlib import Path

import torch

from model import store_by_columns
from prepare_data import Parser, get_encoding, run
from train import load_checkpoint, pick_device, pick_dtype


def latest_run():
    """The folder below out/ with the newest checkpoint."""
    found = sorted(Path("out").glob("**/ckpt.pt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError("there is no run below out/: train one with train.py, or name its folder with --out_dir")
    return found[-1].parent


def read_prompt(args):
    """The prompt as text: --prompt, or else --prompt_file, or else what is piped in, or else nothing."""
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is not None:
        data = Path(args.prompt_file).read_bytes()
    else:
        data = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.prompt_file or 'standard input'} is not UTF-8 text: {error}") from None


def main():
    parser = Parser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--out_dir", help="run folder (default: the run below out/ that was trained last)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to go on from (default: what is piped in, or else nothing)")
    source.add_argument("--prompt_file", help="file with the text to go on from, UTF-8")
    parser.add_argument("--special", action="store_true", help="read <|endoftext|> in the prompt as the token, not as text")
    parser.add_argument("--num_samples", type=int, default=1, help="how many texts to write")
    parser.add_argument("--max_new_tokens", type=int, default=500, help="longest text, in tokens")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token")
    parser.add_argument("--top_k", type=int, help="sample from the k likeliest tokens only")
    parser.add_argument("--top_p", type=float, help="sample from the likeliest tokens that together reach this probability")
    parser.add_argument("--seed", type=int, default=1337, help="the same seed writes the same text")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... or mps")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16")
    args = parser.parse_args()
    if args.num_samples < 1 or args.max_new_tokens < 1:
        raise ValueError(f"num_samples {args.num_samples} and max_new_tokens {args.max_new_tokens} must be at least 1")

    device = pick_device(args.device)
    model, checkpoint = load_checkpoint(Path(args.out_dir or latest_run(), "ckpt.pt"))
    model.to(device, pick_dtype(args.dtype, device))
    if device.type == "cpu":
        store_by_columns(model)
    encoding = get_encoding(checkpoint["meta"]["encoding"])
    prompt = read_prompt(args)
    ids = encoding.encode(prompt, allowed_special="all") if args.special else encoding.encode_ordinary(prompt)
    if len(ids) > model.config.block_size:
        print(f"note: the prompt's last {model.config.block_size} of {len(ids)} tokens are read", file=sys.stderr)
    idx = torch.tensor([ids or [encoding.eot_token]], device=device)

    torch.manual_seed(args.seed)
    count, began = 0, time.perf_counter()
    for i in range(args.num_samples):
        stream = model.stream(idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p)
        print("-" * 20 + "\n" if i else "", end="")
        print(prompt, end="", flush=True)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # keeps the first bytes of a character back
        for new in stream:
            count += 1
            if new.item() == encoding.eot_token:
                break
            print(decoder.decode(encoding.decode_single_token_bytes(new.item())), end="", flush=True)
        print(decoder.decode(b"", final=True))
    seconds = time.perf_counter() - began
    print(f"{count} tokens, {count / seconds:.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    run(main)
