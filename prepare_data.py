"""
Text to token ids: data/<name>/train.bin, val.bin and meta.json.

    python prepare_data.py                                    the Python standard library as bytes, no network needed
    python prepare_data.py --dataset shakespeare              or tinystories: public files, downloaded once
    python prepare_data.py --input notes/ log.txt.gz          your own files, folders and URLs
    python prepare_data.py --dataset tinystories --encoding gpt2

A .md or .py file is one document, so is each line of a .jsonl file (its field "text"); a .txt file holds one document,
or several with <|endoftext|> between them. Each can be gzipped (.gz). Text is UTF-8, whatever the locale, and kept byte
for byte: only a byte-order mark in front of a file is dropped, and documents that are empty or blank are left out.

One document in ten is for validation, drawn by a hash, or the last of fewer than ten. A single document is cut as
nanoGPT cuts it: the first 90% of its characters are for training. Within a split the end-of-text token stands between
documents, not in front of the first or behind the last; decoding what lies between gives back each document exactly.

The sources are read twice, to count and check them and then to encode them, and never held in memory.
"""

import argparse
import codecs
import contextlib
import datetime
import difflib
import errno
import gzip
import hashlib
import http.client
import itertools
import json
import os
import platform
import re
import sys
import sysconfig
import tempfile
import time
import urllib.parse
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken

EOT = "<|endoftext|>"
SUFFIXES = (".txt", ".md", ".py", ".jsonl")
BLOCK = 2**20  # bytes read at a time
PIECE = 2**12  # characters encoded at a time: tiktoken slows down on longer stretches without a space
MAX_LINE = 2**26  # bytes in a line of JSON, which is parsed as a whole

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINYSTORIES = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-"
STDLIB = f"the standard library of Python {platform.python_version()}"
DATASETS = {  # name: its sources, and those for validation if it comes split
    "python": ([STDLIB], []),
    "shakespeare": ([SHAKESPEARE], []),
    "tinystories": ([TINYSTORIES + "train.txt"], [TINYSTORIES + "valid.txt"]),
}
SHA256 = {SHAKESPEARE: "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"}
WEB_PAGE = re.compile(rb"(\xef\xbb\xbf)?(\s|<!--.*?-->)*<(!doctype\s+)?html", re.IGNORECASE | re.DOTALL)

# Splits a text where no tiktoken pattern lets a token cross or look beyond: at a single space or behind a single
# newline, between words. The pieces encode to the same tokens as the whole.
CUT = re.compile(r".*\S(?:(?= \w)|\n(?=\w))", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and suggests the nearest flag for a mistyped one."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)

    def error(self, message):
        unknown = re.search(r"unrecognized arguments:.*?\s(--?[^\s=]+)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, n=1) if unknown else []
        hint = "".join(f" (did you mean {flag}?)" for flag in near)
        self.exit(2, f"error: {message}{hint}; {self.prog} --help lists all flags\n")


def run(main):
    """Run a command line's main(): what a user can do wrong ends in one line and exit status 1, not in a traceback."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None: closed by the shell
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe (`| head`) has left: nothing more to say, to anyone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except (MemoryError, OverflowError, RuntimeError) as error:  # torch reports a lack of memory as a RuntimeError
        if isinstance(error, RuntimeError) and not re.search("memory|overflow", str(error)):
            raise
        sys.exit("error: out of memory: use a smaller --batch_size or a smaller model")


@contextlib.contextmanager
def replacing(path, mode="wb"):
    """Open a file beside `path` that takes its place when the block ends well: whole, flushed to disk and renamed."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, mode, **({} if "b" in mode else {"encoding": "utf-8", "newline": ""})) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # it names its file, or is about something else that the block does
        raise OSError(f"{path} could not be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(folder):
    """The same for a folder: make a new one beside `folder` that takes its place when the block ends well."""
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True) as tmp:
        new, old = Path(tmp, "new"), Path(tmp, "old")
        new.mkdir()
        yield new
        try:
            if folder.exists():
                os.replace(folder, old)
            os.replace(new, folder)
        finally:
            if old.exists() and not folder.exists():
                os.replace(old, folder)


class Meter:
    """Counts and hashes the bytes that pass; if they take long, it says on standard error how far they are."""

    def __init__(self, task, total=None):
        self.task, self.total, self.bytes, self.sha256 = task, total, 0, hashlib.sha256()
        # on a terminal the cursor goes back, and what comes next is written over the line
        self.end, self.seconds = ("\r", 1) if sys.stderr.isatty() else ("\n", 30)
        self.start = self.last = time.monotonic()

    def update(self, block):
        self.bytes += len(block)
        self.sha256.update(block)
        now = time.monotonic()
        if now - self.last >= self.seconds:
            line = f"{self.task}: {self.bytes / 1e6:,.0f} MB"
            if self.total:
                left = (now - self.start) * (self.total / self.bytes - 1)
                line += f" of {self.total / 1e6:,.0f} MB, {datetime.timedelta(seconds=int(left))} left"
            print(f"{line:<78}", end=self.end, file=sys.stderr, flush=True)
            self.last = now


def get_encoding(name):
    """Return tiktoken's encoding `name`, or "bytes": ids 0 to 255, and 256 for EOT. ValueError if it cannot be had."""
    names = ["bytes", *tiktoken.list_encoding_names()]
    if name not in names:
        hint = "".join(f" (did you mean {near}?)" for near in difflib.get_close_matches(name, names, n=1))
        raise ValueError(f"unknown encoding {name!r}{hint}: choose from {', '.join(names)}")
    if name == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
        return tiktoken.Encoding(name, pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={EOT: 256})
    if "DATA_GYM_CACHE_DIR" not in os.environ:  # tiktoken's own default is a folder in /tmp that all users share
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(Path(__file__).resolve().with_name("data") / "tiktoken"))
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError, AssertionError) as error:  # no network, no permission, a damaged file
        ways_out = "use --encoding bytes, or set TIKTOKEN_CACHE_DIR to a folder that has it"
        cause = f"tiktoken cannot get at the vocabulary of {name} ({type(error).__name__})"
        raise ValueError(f"{cause}: {ways_out}") from None


def suffix(name):
    """The kind of a file: the last suffix of its name, in lower case, not counting .gz."""
    return Path(name.lower().removesuffix(".gz")).suffix


def download(url, folder):
    """
    Return the path of a file in `folder` with what `url` holds, after downloading it unless it is there already.
    Raises OSError, and leaves nothing behind, if it does not arrive whole, as a text and with the SHA-256 we know.
    """
    name = Path(urllib.parse.urlsplit(url).path).name
    path = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name}"
    if path.exists() and (url not in SHA256 or hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[url]):
        print(f"using {path}, as it was downloaded before", file=sys.stderr)
        return path
    print(f"downloading {url} to {path}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(url, timeout=60) as response, replacing(path) as file:
            meter = Meter("downloading", int(response.headers.get("Content-Length", 0)))
            html = response.headers.get_content_type() == "text/html"
            while block := response.read(BLOCK):
                if html or not meter.bytes and WEB_PAGE.match(block):
                    raise ValueError("the server answers with a web page instead of a text")
                meter.update(block)
                file.write(block)
            if not meter.bytes:
                raise ValueError("the server answers with nothing")
            if meter.total and meter.bytes != meter.total:
                raise ValueError(f"it stopped after {meter.bytes:,} of {meter.total:,} bytes")
            if meter.sha256.hexdigest() != SHA256.get(url, meter.sha256.hexdigest()):
                raise ValueError(f"its SHA-256 is {meter.sha256.hexdigest()} instead of {SHA256[url]}")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise OSError(f"cannot download {url}: {error}") from None
    return path


def walk(folder, suffixes, skip=()):
    """Return the files below `folder` with one of the suffixes, in an order that only their names decide."""
    inside = sorted(Path(folder).iterdir())
    files = [path for path in inside if suffix(path.name) in suffixes and path.is_file()]
    for path in inside:
        if path.is_dir() and not path.is_symlink() and not path.name.startswith(".") and path.name not in skip:
            files += walk(path, suffixes, skip)
    return files


def find(source, downloads):
    """Return the files of a source: a path, a URL or STDLIB. ValueError if there are none, or of another kind."""
    kinds = f"{', '.join(SUFFIXES)} file, plain or .gz"
    if source == STDLIB:
        tests = ("test", "tests", "idle_test")  # the only ones with files that are not UTF-8
        files = walk(sysconfig.get_path("stdlib"), (".py",), skip=(*tests, "site-packages", "dist-packages"))
    elif os.path.isdir(source):
        files = walk(source, SUFFIXES)
    else:
        url = re.match(r"https?://", source)
        if not url and not os.path.isfile(source):
            raise ValueError(f"there is no file or folder {source}")
        if suffix(urllib.parse.urlsplit(source).path if url else source) not in SUFFIXES:
            raise ValueError(f"{source} is not a {kinds}")
        files = [download(source, downloads) if url else Path(source)]
    if not files:
        raise ValueError(f"there is no {kinds}, in {source}")
    return files


def read(path, meter, by_line):
    """Yield the text of a file, unpacked, in blocks or in lines. ValueError if it is no UTF-8 or no whole .gz file."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    size = 0
    try:
        with opener(path, "rb") as file:
            while block := file.readline(MAX_LINE) if by_line else file.read(BLOCK):
                if len(block) == MAX_LINE:
                    raise ValueError(f"{path} has a line of {MAX_LINE:,} bytes or more, too long for one document")
                meter.update(block)
                size += len(block)
                yield decoder.decode(block)
        decoder.decode(b"", final=True)  # does the last character lack a byte?
    except UnicodeDecodeError as error:
        offset = size - len(error.object) + error.start  # in the unpacked file
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {offset}, counted from 0") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is no .gz file, or not a whole one: {error}") from None


def parts(path, meter):
    """Yield the text of a file in parts as (text, last), where `last` says whether a document ends behind the part."""
    kind = suffix(path.name)
    texts = read(path, meter, by_line=kind == ".jsonl")
    if kind == ".jsonl":
        for number, line in enumerate(texts, start=1):
            if line.strip():
                try:
                    text = json.loads(line)["text"]
                    str.encode(text)  # JSON can spell half a surrogate pair, which is no text
                except (ValueError, LookupError, TypeError, RecursionError):
                    raise ValueError(f'{path}, line {number}, is not a JSON object with a text in "text"') from None
                yield text, True
        return
    rest = ""
    for block in texts:
        *whole, rest = (rest + block).split(EOT) if kind == ".txt" else [rest + block]
        yield from ((document, True) for document in whole)
        yield rest[: -len(EOT)], False  # the block may end amid an EOT
        rest = rest[-len(EOT) :]
    yield rest, True


def documents(path, meter):
    """Yield the documents of a file as (first, piece), where `first` says whether a document starts with the piece."""
    first, text = True, ""
    for part, last in parts(path, meter):
        text += part
        if first and last and (not text or text.isspace()):
            text = ""
            continue
        start = 0
        while len(text) - start > 2 * PIECE:
            match = CUT.match(text, start, start + PIECE)
            end = match.end() if match else start + PIECE
            yield first, text[start:end]
            first, start = False, end
        text = text[start:]
        if last:
            yield first, text
            first, text = True, ""


def split(files, val_files, total, characters, meter):
    """Yield ("train" or "val", first, piece) for all documents, `total` of them with so many characters."""
    stream = itertools.chain.from_iterable(documents(path, meter) for path in files)
    if val_files:
        yield from (("train", *piece) for piece in stream)
        yield from (("val", *piece) for path in val_files for piece in documents(path, meter))
    elif total == 1:
        left = int(0.9 * characters)  # characters still to go to the training split
        for first, text in stream:
            if left:
                yield "train", first, text[:left]
            if left <= len(text):
                yield "val", left > 0, text[left:]
            left = max(0, left - len(text))
    else:
        number = -1
        for first, text in stream:
            number += first
            draw = hashlib.sha256(str(number // 10).encode()).digest()[0] % 10  # one of ten consecutive documents
            val = number % 10 == draw if total >= 10 else number == total - 1
            yield "val" if val else "train", first, text


def encode(encoding, texts):
    """Return the token ids of each text. Special tokens in a text are text."""
    if encoding.name == "bytes":
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]
    groups = [texts[i : i + 16] for i in range(0, len(texts), 16)]  # short texts alone would not be worth a task
    with ThreadPoolExecutor() as pool:  # on all cores, since tiktoken works without the GIL
        ids = pool.map(lambda group: [encoding.encode_ordinary(text) for text in group], groups)
        return list(itertools.chain.from_iterable(ids))


def write(folder, stream, encoding, dtype):
    """Encode what `split` yields into train.bin and val.bin. Returns {split: {"tokens", "bytes", "documents"}}."""
    end_of_text = np.array(encoding.eot_token, dtype).tobytes()
    counts = {name: dict(tokens=0, bytes=0, documents=0) for name in ("train", "val")}
    with replacing(folder / "train.bin") as train, replacing(folder / "val.bin") as val:
        files = {"train": train, "val": val}
        while batch := list(itertools.islice(stream, 512)):
            for (name, first, text), ids in zip(batch, encode(encoding, [text for _, _, text in batch])):
                count = counts[name]
                if first and count["documents"]:
                    files[name].write(end_of_text)
                    count["tokens"] += 1
                files[name].write(np.array(ids, dtype).tobytes())
                count["tokens"] += len(ids)
                count["bytes"] += len(text.encode())
                count["documents"] += first
    return counts


def prepare(inputs=(), dataset="python", encoding="bytes", name=None, out_dir="data"):
    """
    Make the dataset out_dir/name from `inputs`, paths and URLs, or without them from a `dataset` named in DATASETS.
    The default of `name` is that of the first input or of the dataset. Returns the folder, where an existing dataset
    is replaced as a whole. Raises ValueError or OSError that says what is wrong with the arguments or the text.
    """
    encoder = get_encoding(encoding)
    if not inputs and dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}: choose from {', '.join(DATASETS)}, or give --input")
    sources, val_sources = ([str(source) for source in inputs], []) if inputs else DATASETS[dataset]
    if name is None:
        stem = os.path.basename(os.path.abspath(sources[0])).split(".")[0]
        name = (re.sub(r"\W+", "-", stem).strip("-") or "text") if inputs else dataset
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ValueError(f"{name!r} cannot name a dataset: use letters, digits and . + - _")
    folder = Path(out_dir, name)
    if folder.exists() and not {path.name for path in folder.iterdir()} <= {"train.bin", "val.bin", "meta.json"}:
        raise ValueError(f"{folder} holds more than a dataset, so it is not replaced: choose another --name")

    downloads = Path(out_dir, "downloads")
    files = [path for source in sources for path in find(source, downloads)]
    val_files = [path for source in val_sources for path in find(source, downloads)]
    meter = Meter("reading")
    total = characters = 0
    for path in files + val_files:
        for first, text in documents(path, meter):
            total += first
            characters += len(text)
    if not total:
        raise ValueError(f"there is no text in {', '.join(sources)}")
    with replacing_folder(folder) as part:
        again = Meter("encoding", meter.bytes)
        dtype = np.dtype("uint16" if encoder.n_vocab <= 2**16 else "uint32")  # the smallest that holds all ids
        counts = write(part, split(files, val_files, total, characters, again), encoder, dtype)
        if again.sha256.digest() != meter.sha256.digest():
            raise ValueError("the text changed while it was read: try again")
        if (least := min(count["tokens"] for count in counts.values())) < 2:
            raise ValueError(f"not enough text: a split would hold {least} tokens, and one sequence takes at least 2")
        meta = dict(encoding=encoding, vocab_size=encoder.n_vocab, dtype=dtype.name, **counts)
        meta["source"] = [*sources, *val_sources]
        meta["sha256"] = meter.sha256.hexdigest()  # of the source's files, unpacked, one behind the other
        with replacing(part / "meta.json", "w") as file:
            json.dump(meta, file, indent=2)
    return folder


def load_dataset(folder):
    """
    Return (meta, train, val): what meta.json says, and two memory maps of ids, (tokens,) each, read once to check them.
    ValueError or OSError, with the file's name, if the dataset is not there or not as `prepare` made it.
    """
    path = Path(folder, "meta.json")
    if not path.exists():
        name = path.parent.name
        made = f"--dataset {name}" if name in DATASETS else f"--input YOUR_TEXT --name {name}"
        raise ValueError(f"there is no {path}: python prepare_data.py {made} makes it")
    try:
        meta = json.loads(path.read_bytes())
        dtype = {"uint16": np.dtype("uint16"), "uint32": np.dtype("uint32")}[meta["dtype"]]
        counts = [meta["vocab_size"], *(meta[name][unit] for name in ("train", "val") for unit in ("tokens", "bytes"))]
        texts = [meta["encoding"], meta["sha256"]]
        if {type(count) for count in counts} != {int} or min(counts) < 1 or {type(text) for text in texts} != {str}:
            raise ValueError
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"{path} is damaged, or not from prepare_data.py: prepare the dataset again") from None
    data = []
    for name in ("train", "val"):
        path, tokens = Path(folder, f"{name}.bin"), meta[name]["tokens"]
        if (size := path.stat().st_size) != tokens * dtype.itemsize:
            raise ValueError(f"{path} has {size:,} bytes, not those of {tokens:,} tokens: prepare the dataset again")
        ids = np.memmap(path, dtype, mode="r")
        largest = max(int(ids[i : i + BLOCK].max()) for i in range(0, tokens, BLOCK))
        if largest >= meta["vocab_size"]:
            raise ValueError(f"{path} holds the id {largest}, beyond its vocabulary of {meta['vocab_size']}")
        data.append(ids)
    return meta, *data


def main():
    parser = Parser(description=__doc__.split("\n\n")[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--dataset", default="python", help=f"what to prepare: {', '.join(DATASETS)}")
    source.add_argument(
        "--input", dest="inputs", nargs="+", default=argparse.SUPPRESS, metavar="PATH_OR_URL",
        help=f"your own text instead: files, folders, URLs ({', '.join(SUFFIXES)}, each also .gz)",
    )  # fmt: skip
    parser.add_argument("--encoding", default="bytes", help="bytes, gpt2, or another of tiktoken's")
    parser.add_argument("--name", default=argparse.SUPPRESS, help="name of the dataset (default: that of its source)")
    parser.add_argument("--out_dir", default="data", help="folder of the datasets")
    folder = prepare(**vars(parser.parse_args()))
    meta, train, val = load_dataset(folder)
    print(f"{folder}: {len(train):,} tokens for training, {len(val):,} for validation, {meta['vocab_size']:,} ids")
    print(f"next: python train.py --dataset {folder.name if folder.parent == Path('data') else folder.resolve()}")


if __name__ == "__main__":
    run(main)
