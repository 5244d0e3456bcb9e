"""The extension's corner."""


def _demangle(name):
    return {"_Z5storePKfPf": "store(float const*, float*)"}.get(name, name)
