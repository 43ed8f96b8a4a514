"""A job of its own that reads a topic in order of time into files: `ADDRESS TOPIC FOLDER`. It says when a batch is
done, and goes on until it is killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.conditions import until


def ordered(spark: Any, address: str, topic: str, folder: str) -> Any:
    """The query, started, or started again from its checkpoint."""
    told = {"addresses": address, "topic": topic, "partitions": "1", "maxRowsPerBatch": "50", "wait": "200ms"}
    frame = spark.readStream.format("timeline").options(**told).load().select("id", "due")
    return (
        frame.writeStream.format("json")
        .option("path", f"{folder}/out")
        .option("checkpointLocation", f"{folder}/state")
        .start()
    )


def main(address: str, topic: str, folder: str) -> None:
    from timeline.pipeline import spark_session

    settings = {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
    }
    query = ordered(spark_session("reordering", "local[2]", settings), address, topic, folder)
    first = Path(folder) / "out" / "_spark_metadata" / "0"

    def is_done() -> bool:
        if not query.isActive:
            raise SystemExit(str(query.exception()))
        return first.exists()

    until(is_done, within_s=600.0)
    os.write(1, b"a batch is done\n")
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
