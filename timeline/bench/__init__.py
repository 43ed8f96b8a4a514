"""What `timeline bench` runs: one scenario a file, each an async function of its settings that answers a `BenchReport`.

`processes.py` starts brokers and peers in processes of their own on free ports and ends them by their id; `load.py`
makes honest load (random ids over all buckets); `figures.py` is what a measurement says of itself.
"""
