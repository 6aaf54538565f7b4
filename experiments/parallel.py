"""Function calls in several processes. Importing this file imports no torch."""

from collections.abc import Callable, Mapping, Sequence

from joblib import Parallel, delayed
from tqdm import tqdm


def in_parallel(jobs: Sequence[tuple[Callable, tuple]], workers: int, label: str) -> list:
    """The results of function calls, in order, with a progress bar; an interrupt ends them all.

    Args:
        jobs: functions with their arguments.
        workers: number of processes; up to 1: this process.
        label: of the progress bar.
    """
    calls = [delayed(function)(*arguments) for function, arguments in jobs]
    results = Parallel(n_jobs=max(workers, 1), return_as='generator')(calls)
    return list(tqdm(results, label, len(calls), disable=None))


def groups_in_parallel(
    jobs: Mapping[str, Sequence[tuple[Callable, tuple]]], workers: int, label: str
) -> dict[str, list]:
    """As `in_parallel`, of calls and results by the name of their group."""
    results = iter(in_parallel([job for group in jobs.values() for job in group], workers, label))
    return {name: [next(results) for _ in group] for name, group in jobs.items()}
