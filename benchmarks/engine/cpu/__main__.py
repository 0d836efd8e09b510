"""`python -m benchmarks.engine.cpu`."""

from benchmarks.engine.cpu.run import main
from benchmarks.harness.checks import WrongAnswers

try:
    main()
except WrongAnswers as error:
    raise SystemExit(f"wrong answers: {error}") from None
