"""Lists the contents of a compiled model: python list_context.py FILE. The format is described in context_format.md."""

import hashlib
import json
import struct
import sys

PIECE = 1 << 22  # bytes of an array that are hashed on their own


def read(path):
    """Return the index, and a function that returns the bytes of an array by its number."""
    with open(path, "rb") as file:
        data = file.read()
    magic, major, _, _, size, offset, length, digest = struct.unpack_from("<8sHHIQQQ32s", data)
    if magic != b"\x89OCPCTX\n" or major != 1:
        sys.exit(f"{path} is not a context of format 1")
    index = data[offset : offset + length]
    if size != len(data) or hashlib.sha256(index).digest() != digest:
        sys.exit(f"{path} is damaged")
    index = json.loads(index)

    def array(number):
        start, count, expected = index["arrays"][number]
        found = data[start : start + count]
        pieces = [hashlib.sha256(found[at : at + PIECE]).digest() for at in range(0, count, PIECE)]
        if hashlib.sha256(b"".join(pieces)).hexdigest() != expected:
            sys.exit(f"array {number} is damaged")
        return found

    return index, array


def main(path):
    index, array = read(path)
    print(f"{path}: made by version {index['made_by']['plugin']}, {len(index['arrays'])} arrays")
    for number, constant in enumerate(index["constants"]):
        place = constant.get("source") or constant.get("recipe") or f"{len(array(constant['array']))} bytes"
        print(f"constant {number}: element type {constant['dtype']}, shape {constant['shape']}, {place}")
    for number, kernel in enumerate(index["kernels"]):
        print(f"kernel {number}: {kernel['entry']} for {kernel['arch']}, {len(array(kernel['image']))} bytes")
    for partition in index["partitions"]:
        print(f"partition {partition['name']}")
        for kind in ("inputs", "outputs"):
            print(f"  {kind}: {', '.join(port['name'] for port in partition[kind])}")
        graph = json.loads(array(partition["graph"]))["graph"]
        print(f"  operators: {', '.join(sorted({node['op_type'] for node in graph['nodes']}))}")
        for target in partition["targets"]:
            print(f"  for {target['arch']}: kernels {target['kernels']}, {len(target['weights'])} weights")
            for number, plan in enumerate(target["plans"]):
                blob = array(plan)
                header = struct.unpack_from("<20I", blob)
                print(f"    plan {number}: version {header[1]}, {header[14]} records, {len(blob)} bytes")
            for failure in target["failures"]:
                print(f"    no plan for {failure}")


if __name__ == "__main__":
    main(sys.argv[1])
