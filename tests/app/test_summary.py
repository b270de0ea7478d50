"""What a run ends with on the screen."""

from pathlib import Path

from lightning_gradcomp.app import summary


def test_the_final_table_fits_into_100_columns_however_slow_the_machine():
    milliseconds = {"compute": 1897.1, "compress": 3384.8, "exchange": 1073.2, "decompress": 1143.5}
    last = {"bytes_sent": 105_440, "ratio": 423.9}
    cost = {"world_size": 2, "bytes_sent": 4_640_000, "dense_bytes": 1_970_000_000, "ratio": 423.9}
    result = {
        "config": {
            "model": {"target": None, "name": "resnet18"},
            "data": {"name": "digits"},
            "dry_run": False,
            "compressor": {"name": "gradient_dropping"},
        },
        "communication": {**cost, "milliseconds": milliseconds, "last_step": last, "topology": "all_gather"},
        "epochs": 100,
        "wall_seconds": 10_000,
        "device": "NVIDIA H100 80GB HBM3",
        "devices_per_node": 2,
        "gpus_per_node": 1,
        "val_correct": 325,
        "val_images": 360,
    }
    lines = summary.table(result, Path("runs")).splitlines()
    assert max(map(len, lines)) <= 100
    assert (
        "  time per step        7499 ms: compute 1897, compress 3385, exchange 1073, decompress 1144 (median)" in lines
    )
    assert "  GPUs a node          1, shared by 2 processes, which exchange over gloo" in lines
