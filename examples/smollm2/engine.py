"""Continuous batching over one paged cache: prompts in chunks, decodes beside them, shared prefixes; attnfold answers all
attention of a step in one call per layer."""

import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import attnfold.call_file
import numpy as np

PAGE = 16


@dataclass
class Request:
    tokens: list  # the prompt, then what was generated
    max_tokens: int
    end: int = -1
    temperature: float = 0.0
    seed: int = 0
    on_token: object = None
    keep_logits: bool = False
    logits: list = field(default_factory=list)
    pages: list = field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are in the pages
    shared: int = 0  # of them, found there when the request came

    def __post_init__(self):
        self.prompt_len = len(self.tokens)
        self.random = np.random.default_rng(self.seed)

    @property
    def generated(self):
        return [t for t in self.tokens[self.prompt_len :] if t != self.end]


class Pages:
    """Who holds which page.  Full pages are known by all tokens up to their end; unused ones stay until they are needed."""

    def __init__(self, n):
        self.idle = OrderedDict((page, None) for page in range(n))  # without users, longest unused first
        self.users, self.key, self.page = [0] * n, [None] * n, {}

    def take(self):
        page, _ = self.idle.popitem(last=False)
        self.page.pop(self.key[page], None)
        self.users[page], self.key[page] = 1, None
        return page

    def share(self, tokens):
        """Pages that hold the beginning of these tokens, except the last one, which has to be computed."""
        found = []
        while (len(found) + 1) * PAGE < len(tokens):
            page = self.page.get(tuple(tokens[: (len(found) + 1) * PAGE]))
            if page is None:
                break
            self.users[page] += 1
            self.idle.pop(page, None)
            found.append(page)
        return found

    def filled(self, page, tokens):
        if self.page.setdefault(tuple(tokens), page) == page:
            self.key[page] = tuple(tokens)

    def give_back(self, pages):
        for page in pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                self.idle[page] = None


class Engine:
    def __init__(self, model, *, num_pages=1024, max_batch=32, chunk=128, attention="attnfold"):
        c = model.config
        self.model, self.pages, self.max_batch, self.chunk = model, Pages(num_pages), max_batch, chunk
        self.waiting, self.running = deque(), []
        self.pool, self.by_batch = dict(page_size=PAGE, num_pages=num_pages), attention == "by-batch"
        self.cache = np.zeros((c.layers, 2, num_pages, PAGE, c.kv_heads, c.head_dim), np.float16)
        self.plan = attnfold.create(
            qo_heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, q_dtype="float32", kv_dtype="float16",
            max_batch=max_batch, max_qo_rows=max_batch + chunk, max_kv_len=num_pages * PAGE, **self.pool,
        )  # fmt: skip
        self.steps, self.attention_seconds, self.dump = 0, 0.0, None  # dump: (layer, step, file)

    def run(self, requests):
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()

    def step(self):
        batch = self._schedule()
        self.qo_indptr = np.cumsum([0] + [n for _, n in batch], dtype=np.int32)
        self.kv_len = np.array([r.cached + n for r, n in batch], np.int32)
        self.table = np.full((len(batch), max(len(r.pages) for r, _ in batch)), -1, np.int32)
        for row, (r, _) in zip(self.table, batch):
            row[: len(r.pages)] = r.pages
        begun = time.perf_counter()
        self.plan.update(self.qo_indptr, self.kv_len, self.table)
        self.slots = attnfold.slot_mapping(self.qo_indptr, self.kv_len, self.table, **self.pool)
        self.attention_seconds += time.perf_counter() - begun
        tokens = np.concatenate([r.tokens[r.cached : r.cached + n] for r, n in batch])
        positions = np.concatenate([np.arange(r.cached, r.cached + n) for r, n in batch])
        last = np.array([i for i, (r, n) in enumerate(batch) if r.cached + n == len(r.tokens)], int)
        logits = self.model.forward(tokens, positions, self.qo_indptr[1:][last] - 1, self._attention)
        for r, n in batch:
            for page in range(r.cached // PAGE, (r.cached + n) // PAGE):
                self.pages.filled(r.pages[page], r.tokens[: (page + 1) * PAGE])
            r.cached += n
        for i, row in zip(last, logits):
            self._sample(batch[i][0], row)
        self.steps += 1

    def _schedule(self):
        """A token of each running request, and prompts in pieces of `chunk` tokens in all."""
        while self.waiting and len(self.running) < self.max_batch:
            r = self.waiting[0]
            r.pages = self.pages.share(r.tokens)
            need = -(-(len(r.tokens) + r.max_tokens) // PAGE) - len(r.pages)
            if need > len(self.pages.idle):
                assert self.running, "a request is larger than the cache"
                self.pages.give_back(r.pages)
                break
            r.cached = r.shared = len(r.pages) * PAGE
            r.pages += [self.pages.take() for _ in range(need)]
            self.running.append(self.waiting.popleft())
        batch, budget = [], self.chunk
        for r in self.running:
            n = len(r.tokens) - r.cached
            if n > 1:
                n = min(n, budget)
                budget -= n
            batch += [(r, n)] if n else []
        return batch

    def _sample(self, r, logits):
        if r.keep_logits:
            r.logits.append(logits.copy())
        if r.temperature > 0:
            logits = logits / r.temperature + r.random.gumbel(size=len(logits))
        r.tokens.append(int(np.argmax(logits)))
        if r.on_token:
            r.on_token(r)
        if r.tokens[-1] == r.end or len(r.tokens) == r.prompt_len + r.max_tokens:
            self.running.remove(r)
            self.pages.give_back(r.pages)

    def _attention(self, layer, q, k, v):
        begun = time.perf_counter()
        k_cache, v_cache = self.cache[layer]
        attnfold.append(k_cache, v_cache, k, v, self.slots)
        o = self._attention_by_batch(q, k_cache, v_cache) if self.by_batch else self.plan.run(q, k_cache, v_cache)
        self.attention_seconds += time.perf_counter() - begun
        if self.dump and self.dump[:2] == (layer, self.steps):
            n = self.table.max() + 1
            tensors = dict(q=q, qo_indptr=self.qo_indptr, k_cache=k_cache[:n], v_cache=v_cache[:n], block_table=self.table)
            how = dict(mask="causal", sm_scale=q.shape[2] ** -0.5, page_size=PAGE, kv_layout="NHD", recorded_by="smollm2")
            attnfold.call_file.save(self.dump[2], tensors | dict(kv_len=self.kv_len, o=o), how)
        return o

    def _attention_by_batch(self, q, k_cache, v_cache):
        """What attnfold does not do: decodes are cut into as many parts as fill the machine, by the batch."""
        o, num_parts = np.empty_like(q), max(1, 16 // len(self.kv_len))
        for r, n in enumerate(self.kv_len):
            rows, pages = slice(self.qo_indptr[r], self.qo_indptr[r + 1]), self.table[r, : -(-n // PAGE)]
            k, v = (x[pages].reshape(-1, *x.shape[2:])[:n] for x in (k_cache, v_cache))
            cuts = np.linspace(0, n, (min(num_parts, n) if rows.stop - rows.start == 1 else 1) + 1).astype(int)
            parts = [attnfold.attention(q[rows], k[a:b], v[a:b], True, True) for a, b in zip(cuts, cuts[1:])]
            o[rows], _ = attnfold.merge(parts)
        return o
