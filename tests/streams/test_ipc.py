"""Tensors and events that processes share by CUDA IPC, on the emulated device."""

from __future__ import annotations

import pytest

from isolated import HARNESS
from two_processes import MODES, run_pair

HARNESS_PATH = str(HARNESS)


@pytest.mark.parametrize("mode", [each for each in MODES if each != "adversarial-check"])
def test_a_session_runs_on_another_processs_tensor(mode: str) -> None:
    """The memory is shared, not copied: the exporter sees what the importer's Run wrote."""
    code = """
    def exporter(other):
        ort, ipc = start()
        a, c = value_of(ort, np.arange(8, dtype=np.float32)), value_of(ort, np.zeros(8, np.float32))
        other.send([ipc.get_handle(a), ipc.get_handle(c)])
        other.recv()
        print(c.numpy())

    def importer(other):
        ort, ipc = start()
        import ort_cuda_plugin
        from isolated import add_model
        session = ort_cuda_plugin.session(add_model(), emulate=EMULATE)
        a, c = (ipc.open_handle(handle) for handle in other.recv())
        with a, c:
            binding = session.io_binding()
            binding.bind_ortvalue_input("a", a.ortvalue())
            ort_cuda_plugin.bind_input(binding, "b", a)
            binding.bind_ortvalue_output("c", c.ortvalue())
            ort_cuda_plugin.reset_counters()
            session.run_with_iobinding(binding)
            counters = ort_cuda_plugin.counters()
            print([counters[f"copies_{kind}"] for kind in ("h2d", "d2h", "d2d")])
            del binding, counters
        other.send("done")
    """
    lines = run_pair(code, mode, env={"PYTHONPATH": HARNESS_PATH})
    assert sorted(lines) == ["[ 0.  2.  4.  6.  8. 10. 12. 14.]", "[0, 0, 0]"]


@pytest.mark.parametrize("mode", MODES)
def test_events_order_the_streams_of_two_processes(mode: str) -> None:
    """Each process only enqueues: neither waits for its device before the last step."""
    code = """
    STEPS, BYTES = 12, 1000

    def exporter(other):
        ort, ipc = start()
        device, value = open_device(), value_of(ort, np.zeros(BYTES, np.uint8))
        stream, ready = device.stream(), ipc.Event()
        other.send([ipc.get_handle(value), ready.handle()])
        done = ipc.open_event(other.recv())
        for step in range(1, STEPS + 1):
            done.wait(stream_number(stream))
            device.call("MemsetD8Async", value.data_ptr(), step, BYTES, stream.handle)
            ready.record(stream_number(stream))
            other.send(step)
            other.recv()
        stream.synchronize()
        done.close()
        other.send("closed")
        other.recv()
        ready.close()

    def importer(other):
        ort, ipc = start()
        from ort_cuda_plugin.abi.emulation import findings
        device = open_device()
        stream, done = device.stream(), ipc.Event()
        handle, ready = other.recv()
        ready = ipc.open_event(ready)
        other.send(done.handle())
        copies = [device.upload(np.zeros(BYTES, np.uint8)) for _ in range(STEPS)]
        with ipc.open_handle(handle) as tensor:
            x = tensor.ortvalue()
            for copy in copies:
                other.recv()
                ready.wait(stream_number(stream))
                device.call("MemcpyDtoDAsync", copy.address, x.data_ptr(), BYTES, stream.handle)
                done.record(stream_number(stream))
                other.send("enqueued")
            done.synchronize()
            assert done.is_done()
            del x
        arrays = [device.download(copy) for copy in copies]
        print([int(array.min()) for array in arrays], [int(array.max()) for array in arrays])
        other.recv()
        ready.close()
        done.close()
        assert findings() == []
        other.send("closed")

    def stream_number(stream):
        from ort_cuda_plugin.abi.core import ffi
        return int(ffi.cast("uintptr_t", stream.handle))
    """
    steps = list(range(1, 13))
    assert run_pair(code, mode) == [f"{steps} {steps}"]


@pytest.mark.parametrize("mode", [each for each in MODES if each != "adversarial-check"])
def test_events_order_the_runs_of_two_processes(mode: str) -> None:
    """The exporter's Runs write a tensor, and the importer's Runs read it; no Run waits for its stream."""
    code = """
    STEPS = 4

    def session_on(stream):
        import onnxruntime as ort, ort_cuda_plugin
        from isolated import add_model
        options = {"user_compute_stream": str(stream.get_handle()), "has_user_compute_stream": "1"}
        session = ort_cuda_plugin.session(add_model(), emulate=EMULATE, provider_options=options)
        run_options = ort.RunOptions()
        run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

        def bound(a, b, c):
            binding = session.io_binding()
            binding.bind_ortvalue_input("a", a)
            binding.bind_ortvalue_input("b", b)
            binding.bind_ortvalue_output("c", c)
            return lambda: session.run_with_iobinding(binding, run_options)
        return bound

    def stream_of_device():
        import ort_cuda_plugin
        (device, *_) = ort_cuda_plugin.register(emulate=EMULATE)
        return device.create_sync_stream()

    def exporter(other):
        ort, ipc = start()
        stream, ready = stream_of_device(), ipc.Event()
        shared, ones = (value_of(ort, np.full(8, n, np.float32)) for n in (0, 1))
        run = session_on(stream)(shared, ones, shared)  # adds 1
        other.send([ipc.get_handle(shared), ready.handle()])
        done = ipc.open_event(other.recv())
        for _ in range(STEPS):
            done.wait(stream)
            run()
            ready.record(stream)
            other.send("enqueued")
            other.recv()
        done.synchronize()
        done.close()
        other.send("closed")
        other.recv()
        ready.close()

    def importer(other):
        ort, ipc = start()
        stream, done = stream_of_device(), ipc.Event()
        handle, event = other.recv()
        ready, results = ipc.open_event(event), [value_of(ort, np.zeros(8, np.float32)) for _ in range(STEPS)]
        with ipc.open_handle(handle) as tensor:
            shared = tensor.ortvalue()
            bound = session_on(stream)
            runs = [bound(shared, shared, result) for result in results]
            other.send(done.handle())
            for run in runs:
                other.recv()
                ready.wait(stream)
                run()
                done.record(stream)
                other.send("enqueued")
            done.synchronize()
            del shared, runs, run
            gc.collect()
        print([float(value.numpy()[3]) for value in results])
        other.recv()
        ready.close()
        done.close()
        other.send("closed")
    """
    assert run_pair(code, mode, env={"PYTHONPATH": HARNESS_PATH}) == ["[2.0, 4.0, 6.0, 8.0]"]


def test_memory_outlives_its_importers() -> None:
    """The emulated device refuses to free memory that another process has open; CUDA leaves that open."""
    code = """
    def exporter(other):
        ort, ipc = start()
        device = open_device()
        array = device.upload(np.arange(2000, dtype=np.int32))
        for _ in range(2):
            handle = ipc.get_handle(array)
            other.send(handle)
            other.recv()
            address = array.address
            print(refused(device.call, "MemFree", address))
            other.send("close")
            other.recv()
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # the importer has ended and never closed the handle
        device.call("MemFree", address)
        array.address = 0
        print(refused(device.call, "MemFree", address))

    def importer(other):
        ort, ipc = start()
        handle = other.recv()
        with ipc.open_handle(handle) as tensor, ipc.open_handle(handle) as again:
            print(again.ortvalue().numpy()[-1])
            gc.collect()
            other.send("open")
            other.recv()
        other.send("closed")
        tensor = ipc.open_handle(other.recv())
        other.send("open")
        other.recv()
        other.send("ends")
        sys.stdout.flush()
        os._exit(0)
    """
    in_use = "CudaError: MemFree: CUDA_ERROR_ILLEGAL_STATE (CUDA IPC memory: another process still has the memory at"
    lines = sorted(run_pair(code))
    assert lines[0] == "1999"
    assert [line.startswith(in_use) for line in lines] == [False, True, True, False]
    assert "no allocation starts at" in lines[-1]


def test_the_exporter_may_end_first() -> None:
    """An open tensor keeps its contents; a handle of an ended process opens nothing."""
    code = """
    def exporter(other):
        ort, ipc = start()
        value, event = value_of(ort, np.full(5, 3.5, np.float16)), ipc.Event()
        event.record()
        other.send([ipc.get_handle(value), event.handle()])
        other.recv()

    def importer(other):
        ort, ipc = start()
        memory, event = other.recv()
        with ipc.open_handle(memory) as tensor:
            opened = ipc.open_event(event)
            other.send("open")
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            opened.wait()
            print(tensor.ortvalue().numpy())
            gc.collect()
        opened.close()
        print(refused(ipc.open_handle, memory))
        print(refused(ipc.open_event, event))
    """
    values, memory, event = run_pair(code, exporter_is_parent=False)
    assert values == "[3.5 3.5 3.5 3.5 3.5]"
    assert "does not have the exported object: No such file or directory" in memory
    assert "while the exporter lives and has not freed the tensor" in memory
    assert "does not have the exported object: No such file or directory" in event


def test_damaged_handles_are_refused() -> None:
    code = """
    import dataclasses, pickle

    def exporter(other):
        ort, ipc = start()
        value, event = value_of(ort, np.arange(8, dtype=np.float32)), ipc.Event()
        other.send([ipc.get_handle(value), event.handle(), os.pipe()[0]])
        other.recv()

    def importer(other):
        ort, ipc = start()
        handle, event, pipe = other.recv()
        changed = lambda **changes: dataclasses.replace(handle, **changes)
        count = 0
        for index in range(24):
            damaged = bytearray(handle.memory)
            damaged[index] ^= 0x40
            text = refused(ipc.open_handle, changed(memory=bytes(damaged)))
            assert "INVALID_HANDLE" in text or "INVALID_CONTEXT" in text, text
            damaged = bytearray(event.event)
            damaged[index] ^= 0x40
            text = refused(ipc.open_event, ipc.EventHandle(bytes(damaged), event.device))
            assert "INVALID_HANDLE" in text or "INVALID_CONTEXT" in text, text
            count += 1
        print(count)
        for memory in (bytes(64), event.event, handle.memory[:20] + pipe.to_bytes(4, "little") + bytes(40)):
            print(refused(ipc.open_handle, changed(memory=memory)))
        print(refused(ipc.open_event, ipc.EventHandle(handle.memory, event.device)))
        print(refused(ipc.open_handle, changed(shape=(1 << 30,))))
        print(refused(ipc.open_handle, changed(offset=1 << 40)))
        for changes in ({"offset": -4}, {"offset": 2}, {"shape": (0,)}, {"shape": (-1, -8)}, {"shape": (1 << 60, 9)},
                        {"shape": [8]}, {"dtype": "string"}, {"dtype": 1}, {"memory": b"x"}, {"device": "x"}):
            print(refused(lambda: changed(**changes)))
        print(refused(ipc.open_handle, changed(device="0" * 32)))
        print(refused(ipc.open_handle, handle.memory))
        assert pickle.loads(pickle.dumps(handle)) == handle
        bad = pickle.dumps(handle).replace(b"float32", b"float99")
        print(refused(pickle.loads, bad))
        with ipc.open_handle(handle) as tensor:
            print(tensor.shape, tensor.dtype)
        other.send("done")
    """
    lines = run_pair(code)
    expected = [
        "24",
        "these 64 bytes are not a handle of the emulated device",
        "these 64 bytes are not a handle of the emulated device",
        "does not have the exported object",
        "these 64 bytes are not a handle of the emulated device",
        "4294967296 bytes at offset 0 do not fit into the allocation of",
        "32 bytes at offset 1099511627776 do not fit into the allocation of",
        "offset of the handle: got -4, expected 0 or a positive multiple of the element size, 4 bytes",
        "offset of the handle: got 2",
        "shape of the handle: got (0,), expected a tuple of positive integers",
        "shape of the handle: got (-1, -8)",
        "exceeds 2**48 bytes",
        "shape of the handle: got [8]",
        "dtype of the handle: got 'string', expected one of bfloat16, bool",
        "dtype of the handle: got 1",
        "memory of the handle: got 1 bytes, expected 64 bytes",
        "device of the handle: got 'x', expected a UUID",
        f"no device of this process has the UUID {'0' * 32}. Known devices: 0 (Emulated CUDA device)",
        "TypeError: handle: expected an ort_cuda_plugin.ipc.MemoryHandle, got bytes",
        "ValueError: dtype of the handle: got 'float99'",
        "(8,) float32",
    ]
    assert len(lines) == len(expected)
    for line, text in zip(lines, expected, strict=True):
        assert text in line


def test_memory_of_cudas_pool_is_refused() -> None:
    code = """
    def exporter(other):
        ort, ipc = start()
        import ort_cuda_plugin
        from isolated import add_model
        session = ort_cuda_plugin.session(
            add_model(), emulate=True, provider_options={"arena.use_cuda_mempool": "1"}
        )
        value = value_of(ort, np.zeros(8, np.float32))
        print(refused(ipc.get_handle, value))
        print(refused(ipc.get_handle, ort.OrtValue.ortvalue_from_numpy(np.zeros(8, np.float32))))
        print(refused(ipc.get_handle, value_of(ort, np.zeros((0, 8), np.float32))))
        print(refused(ipc.get_handle, np.zeros(8)))

    def importer(other):
        pass
    """
    pool, host, empty, array = run_pair(code, env={"PYTHONPATH": HARNESS_PATH})
    assert "CUDA can share only memory of cuMemAlloc between processes" in pool
    assert "do not set arena.use_cuda_mempool" in pool
    assert "TypeError: value: expected a tensor in device memory" in host
    assert "ValueError: value: the device of an array without elements is unknown" in empty
    assert "TypeError: value: expected an array in CUDA memory" in array


def test_element_types_and_offsets_pass() -> None:
    """Tensors within one allocation, each with its offset; bool and bfloat16 have rules of their own."""
    code = """
    ONNX = {"float64": "double"}
    TYPES = ("bool", "int8", "uint16", "float16", "bfloat16", "int64", "float64")

    def exporter(other):
        ort, ipc = start()
        values = [value_of(ort, array_of(name)) if name != "bfloat16" else bfloat16_of(ort) for name in TYPES]
        handles = [ipc.get_handle(value) for value in values]
        print(len({handle.memory for handle in handles}), len({handle.offset for handle in handles}))
        other.send(handles)
        other.recv()

    def importer(other):
        ort, ipc = start()
        from ort_cuda_plugin.arrays import memory_of
        for name, handle in zip(TYPES, other.recv()):
            with ipc.open_handle(handle) as tensor:
                assert (tensor.dtype, tensor.shape) == (name, (2, 3)), (tensor.dtype, tensor.shape)
                memory = memory_of(tensor, name)  # as bind_input sees it
                assert (memory.dtype.name.lower(), memory.shape) == (name, (2, 3))
                if name == "bfloat16" and int(ort.__version__.split(".")[1]) < 32:
                    assert "before 1.32 makes no OrtValue of a bfloat16 tensor" in refused(tensor.ortvalue)
                else:
                    value = tensor.ortvalue()
                    assert (value.data_ptr(), value.data_type()) == (memory.address, f"tensor({ONNX.get(name, name)})")
                    if name != "bfloat16":
                        np.testing.assert_array_equal(value.numpy(), array_of(name))
                    del value
                del memory
            print(refused(tensor.ortvalue))
        other.send("done")

    def array_of(name):
        return (np.arange(6) % 2 + 3 * (name != "bool")).reshape(2, 3).astype(name)

    def bfloat16_of(ort):
        return ort.OrtValue.ortvalue_from_shape_and_type([2, 3], 16, "cuda", 0)
    """
    lines = sorted(run_pair(code))
    assert lines[0] == "1 7"
    assert lines[1:] == ["ValueError: tensor: it is closed. Open the handle again"] * 7


def test_devices_are_found_by_uuid() -> None:
    code = """
    def exporter(other):
        ort, ipc = start()
        value = ort.OrtValue.ortvalue_from_numpy(np.arange(4, dtype=np.int32), "cuda", 1)
        event = ipc.Event(1)
        event.record()
        other.send([ipc.get_handle(value), event.handle()])
        other.recv()

    def importer(other):
        ort, ipc = start()
        handle, event = other.recv()
        opened = ipc.open_event(event)
        opened.synchronize()
        opened.close()
        with ipc.open_handle(handle) as tensor:
            print(tensor.__dlpack_device__(), tensor.ortvalue().numpy())
        other.send("done")
    """
    assert run_pair(code, env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2"}) == ["(2, 1) [0 1 2 3]"]


def test_a_driver_without_cuda_ipc_is_named() -> None:
    code = """
    def exporter(other):
        ort, ipc = start()
        print(refused(ipc.get_handle, value_of(ort, np.zeros(8, np.float32))))
        event = ipc.Event()
        print(refused(event.handle))

    def importer(other):
        pass
    """
    faults = {"ORT_CUDA_PLUGIN_EMULATE_FAULTS": "unsupported=IpcGetMemHandle,IpcGetEventHandle"}
    memory, event = run_pair(code, env=faults)
    assert memory.startswith("CudaError: cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED")
    assert event.startswith("CudaError: cuIpcGetEventHandle: CUDA_ERROR_NOT_SUPPORTED")
