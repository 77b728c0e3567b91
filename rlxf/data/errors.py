"""Exceptions of datasets."""


class DatasetError(ValueError):
    """Error for a dataset that is unknown, empty, truncated, altered, or incompatible with another.

    The message names the dataset or file, the fault, and the remedy.
    """


class RowError(ValueError):
    """Error for an invalid row in a batch of observations or actions.

    Args:
        row: index of the row.
        fault: description of the fault, as the end of the sentence "the observation ...".
    """

    def __init__(self, row: int, fault: str):
        super().__init__(f"row {row}: it {fault}")
        self.row = row
        self.fault = fault
