// The C library's allocator, told to keep large blocks.

#pragma once

namespace maelm {

// From now on, large blocks that are freed stay with the process and are used again, until it ends. By default glibc
// returns a block of a few tens of MiB to the system at once, and every training step pays anew for the pages of every
// activation. They lie in pages of 2 MiB where Linux has some to give, up to half of the machine's memory. The price: the
// process stays as large as it ever was. Returns false, with nothing changed, where the C library is not glibc.
bool keep_freed_memory();

}  // namespace maelm
