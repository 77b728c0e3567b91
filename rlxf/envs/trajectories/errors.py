"""What goes wrong with datasets."""


class DatasetError(ValueError):
    """A dataset cannot be learned from: unknown, empty, truncated, altered, or not of one kind with another.

    The message is one sentence with the dataset or file, what is wrong with it, and what to do.
    """


class RowError(ValueError):
    """One row of a batch of observations or actions is wrong.

    Args:
        row: which one, counted from 0.
        fault: what is wrong with it, as the end of the sentence "the observation ...".
    """

    def __init__(self, row: int, fault: str):
        super().__init__(f"row {row}: it {fault}")
        self.row = row
        self.fault = fault
