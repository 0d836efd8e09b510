"""`python -m benchmarks.serving.hostile`."""

from benchmarks.serving.hostile.run import main

main()
