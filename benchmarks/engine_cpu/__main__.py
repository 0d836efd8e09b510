"""`python -m benchmarks.engine_cpu`."""

from benchmarks.checks import WrongAnswers
from benchmarks.engine_cpu.run import main

try:
    main()
except WrongAnswers as error:
    raise SystemExit(f"wrong answers: {error}") from None
