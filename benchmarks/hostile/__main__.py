"""`python -m benchmarks.hostile`."""

from benchmarks.hostile.run import main

main()
