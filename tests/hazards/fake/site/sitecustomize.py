"""A sitecustomize that was there before: it must still run."""

import os

os.environ["FAKE_SITE"] = "ran"
