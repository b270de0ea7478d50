"""The strategy that compresses whatever the link: between processes of one machine, "auto" would go dense."""

import lightning_gradcomp as lgc


def forced(compressor="dgc", topology="all_gather", **options):
    return lgc.CompressedDDPStrategy(compressor, topology=topology, **options)
