"""Data sets, and how they are split over silos; a silo's own data file."""

from partitions.datasets import DATASETS, load_dataset
from partitions.manifest import describe, plot_partition, write_partition
from partitions.partition import PARTITIONS, SiloIndices, partition, partition_settings, silo_data
from partitions.silo_file import check_silo_file, read_silo_file, write_silo_file
from partitions.splits import Dataset, SiloData, Split

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Dataset",
    "SiloData",
    "SiloIndices",
    "Split",
    "check_silo_file",
    "describe",
    "load_dataset",
    "partition",
    "partition_settings",
    "plot_partition",
    "read_silo_file",
    "silo_data",
    "write_partition",
    "write_silo_file",
]
