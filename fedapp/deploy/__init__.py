"""Deployment across organisations: folders with the files that start the processes.

``folders`` writes the folder of a coordinator or a site, ``targets`` what is in it. The other files
are the processes themselves: Flower's own with fedapp's log format, a site's that answers with the
installed fedapp, and the metrics exporter; ``warm`` patches Flower's so that an exchange takes
parts of a second. The room knows nothing of methods, models or scores. Read README.md first, and
then ``folders``; UPSTREAM.md lists what Flower could offer instead of the patches.
"""
