"""A server that captures graphs before it answers.

Arguments: the server to become, and its port. HOW is what `program.py` is told.
"""

import os
import runpy
import sys

server, port = sys.argv[1:]
program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "program.py")
sys.argv = [program, os.environ["HOW"]]
runpy.run_path(program, run_name="__main__")
sys.argv = [server, port]
runpy.run_path(server, run_name="__main__")
