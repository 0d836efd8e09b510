"""Files that operators write are UTF-8, whatever the locale of the process."""

import subprocess
import sys

from tests.deploy.spawned import python_path

FILES = {
    "config.yaml": "node-id: zürich\napi-key-file: keys\nnodes-file: nodes.yaml\n",
    "keys": "# Zoë\nkey\n",
    "nodes.yaml": "# Zoë\ndecode: ['127.0.0.1:1']\n",
    "cert.pem": "issuer: Zoë\n",
}
PROGRAM = """
from datetime import UTC, datetime
from pathlib import Path
from baton.settings import load
from deploy.doctor.files import certificate
from router.startup import make_edge, make_membership
from router.settings import RouterSettings
settings = load(RouterSettings, {"config": "config.yaml"})
make_edge(settings), make_membership(settings)
print(ascii(settings.node_id), certificate("", Path("cert.pem"), datetime.now(UTC)).found)
"""


def test_they_are_read_in_the_locale_c(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    env = {**python_path(), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "'z\\xfcrich' cert.pem: there is no certificate.\n"
