"""The scheduler and the page bookkeeping, over a simulated cache whose slots remember what they were written for."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.rollout.paged.kv_cache import PagePool, PageTable
from rlk.rollout.paged.scheduler import Scheduler
from rlk.rollout.paged.sequence import Sequence

EOS = frozenset({0, 1})


def sampled_token(prefix: np.ndarray) -> int:
    """Stands for the model: any function of the whole prefix, so that a wrong cache shows in the tokens."""
    return zlib.crc32(prefix.tobytes()) % 23


def expected_response(prompt: list[int], max_tokens: int) -> tuple[list[int], str]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(sampled_token(np.array(tokens, np.int32)))
        if tokens[-1] in EOS:
            return tokens[len(prompt):], "eos"
    return tokens[len(prompt):], "length"


class Simulation:
    """Runs sequences to their end over a cache whose slots hold the bytes of the prefix they were written for."""

    def __init__(self, pages: PageTable, prefill_chunk: int, max_running: int, sequences: list[Sequence],
                 stops: frozenset[int] = EOS) -> None:
        self.pages = pages
        self.stops = stops
        self.slots = {}
        self.sequences = sequences
        self.scheduler = Scheduler(pages, prefill_chunk, max_running, list(sequences))
        self.trace = []
        self.largest_prefill = 0

    def run(self) -> Simulation:
        while self.scheduler.unfinished:
            self._step()
            self._check_pages()
        return self

    def _step(self) -> None:
        batch = self.scheduler.schedule()
        assert batch, "a step without work would never end"
        assert all(count >= 1 for _, count in batch), "logits come from a row that is computed"
        self.trace.append([(sequence.uid, count, tuple(sequence.pages)) for sequence, count in batch])
        assert len(self.scheduler.running) <= self.scheduler.max_running
        self.largest_prefill = max(self.largest_prefill, sum(count for _, count in batch if count > 1))
        for sequence, count in batch:
            for position in range(sequence.computed, sequence.computed + count):
                self.slots[self._slot(sequence, position)] = sequence.tokens[:position + 1].tobytes()
        finished = []
        for sequence, count in batch:
            end = sequence.computed + count
            for position in range(end):
                assert self.slots[self._slot(sequence, position)] == sequence.tokens[:position + 1].tobytes()
            if end == sequence.length:
                token = sampled_token(sequence.tokens[:end])
                if sequence.append(token, np.float32(token), None, self.stops):
                    finished.append(sequence)
        self.scheduler.commit(batch, finished)

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        page = self.pages.block_table[sequence.lane, position // self.pages.page_size]
        return int(page), position % self.pages.page_size

    def _check_pages(self) -> None:
        pool, running = self.pages.pool, self.scheduler.running
        held = [page for sequence in running for page in sequence.pages]
        assert pool.holders == [held.count(page) for page in range(len(pool.holders))]
        assert pool.available == pool.holders.count(0)
        assert len({sequence.lane for sequence in running}) == len(running)
        for sequence in running:
            assert list(self.pages.block_table[sequence.lane, :len(sequence.pages)]) == sequence.pages


@st.composite
def workloads(draw):
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    max_tokens = draw(st.integers(1, 20))
    shared = draw(st.lists(st.integers(0, 5), max_size=12))
    tails = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=5))
    prompts = [shared + tail for tail in tails]
    samples = draw(st.integers(1, 4))
    longest = max(map(len, prompts)) + max_tokens
    fewest_pages = -(-longest // page_size)
    return dict(page_size=page_size, max_tokens=max_tokens, prompts=prompts, samples=samples, longest=longest,
                num_pages=fewest_pages + draw(st.integers(0, 20)), prefill_chunk=draw(st.integers(1, 20)),
                max_running=draw(st.integers(1, 8)))


def simulate(work: dict, calls: int = 1) -> Simulation:
    pages = PageTable(work["num_pages"], work["page_size"], work["max_running"], work["longest"])
    slots = {}
    for _ in range(calls):
        sequences = [Sequence((number << 16) | sample, np.array(prompt, np.int32), work["max_tokens"])
                     for number, prompt in enumerate(work["prompts"]) for sample in range(work["samples"])]
        simulation = Simulation(pages, work["prefill_chunk"], work["max_running"], sequences)
        simulation.slots = slots
        simulation.run()
    return simulation


@settings(deadline=None, max_examples=300)
@given(workloads())
def test_every_sequence_finishes_with_its_own_tokens_and_every_page_comes_back(work):
    simulation = simulate(work, calls=2)
    for sequence in simulation.sequences:
        prompt = work["prompts"][sequence.uid >> 16]
        response = sequence.tokens[sequence.prompt_length:sequence.length].tolist()
        assert (response, sequence.stop_reason) == expected_response(prompt, work["max_tokens"])
    pool = simulation.pages.pool
    assert pool.holders == [0] * work["num_pages"] and pool.available == work["num_pages"]
    pool.forget()
    assert sorted(pool.take() for _ in range(work["num_pages"])) == list(range(work["num_pages"]))


@settings(deadline=None, max_examples=50)
@given(workloads())
def test_the_schedule_is_a_function_of_the_inputs_and_keeps_the_budget(work):
    first, second = simulate(work), simulate(work)
    assert first.trace == second.trace
    assert first.scheduler.work == second.scheduler.work
    assert first.largest_prefill <= work["prefill_chunk"]


def group(samples: int, prompt_length: int, max_tokens: int = 4) -> list[Sequence]:
    return [Sequence(uid, np.arange(2, 2 + prompt_length, dtype=np.int32), max_tokens) for uid in range(samples)]


def test_the_samples_of_a_prompt_prefill_its_whole_pages_once():
    for chunk in (5, 16, 64, 1000):
        sequences = group(samples=8, prompt_length=70)
        work = Simulation(PageTable(100, 16, 8, 100), chunk, 8, sequences, stops=frozenset()).run().scheduler.work
        assert work.shared == 7 * 64
        assert work.prefilled + work.decoded == 70 + 7 * (70 - 64) + 8 * 3


def test_a_later_call_finds_the_prompt_until_the_digests_are_forgotten():
    pages = PageTable(20, 4, 8, 40)
    Simulation(pages, 64, 8, group(1, 21)).run()
    warm = Simulation(pages, 64, 8, group(1, 21))
    assert warm.pages.admit(warm.sequences[0]) and warm.sequences[0].computed == 20
    pages.release(warm.sequences[0])
    pages.pool.forget()
    assert pages.admit(warm.sequences[0]) and warm.sequences[0].computed == 0


def test_the_youngest_sequence_gives_its_pages_back_and_keeps_what_it_sampled():
    sequences = group(samples=3, prompt_length=4, max_tokens=12)
    pages = PageTable(4, 4, 3, 16)
    simulation = Simulation(pages, 64, 3, sequences, stops=frozenset()).run()
    assert simulation.scheduler.work.preemptions > 0
    assert all(sequence.length == sequence.limit for sequence in sequences)
    first_uids = [step[0][0] for step in simulation.trace]
    assert first_uids == sorted(first_uids), "the oldest sequence is never set back"


def test_an_idle_page_is_reused_only_after_the_free_ones_and_oldest_first():
    pool = PagePool(3)
    first, second = pool.take(), pool.take()
    pool.register(first, b"first")
    pool.register(second, b"second")
    pool.release([first])
    pool.release([second])
    assert pool.take() == 2 and pool.find([b"first", b"second"]) == [first, second]
    assert pool.take() == first and pool.find([b"first"]) == [] and pool.find([b"second"]) == [second]


def test_admission_that_does_not_fit_changes_nothing():
    pages = PageTable(2, 4, 2, 12)
    sequence = group(1, 12)[0]
    assert not pages.admit(sequence)
    assert sequence.pages == [] and sequence.lane == -1 and pages.pool.available == 2
