// An allocator to preload under torch: each of its aligned allocations lies beside pages that nobody may touch.
//
// torch aligns tensors to 64 bytes, so up to 63 bytes may lie between a tensor's end and the page. They hold a pattern
// that free() checks, as do those between the first page's start and the tensor. Fresh memory is full of 0xFF, NaN in
// every floating type; freed memory is never used again, and may not be touched either.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { kPage = 4096, kGuard = 16 * kPage, kPattern = 0xA5, kOff = 0, kEnd = 1, kStart = 2 };
static const size_t kArena = (size_t)1 << 36;

typedef struct {
  size_t size, pages;
  char* data;
} Block;

static char* arena;
static Block* blocks;  // by the block's first page in the arena
static atomic_size_t used;
static atomic_int side = kOff;

static void die(const char* message) {
  if (write(STDERR_FILENO, message, strlen(message)) < 0) _exit(1);
  abort();
}

// Which side of the allocations from now on lies at a page that may not be touched.
void guard_allocations(int wanted) {
  if (arena == NULL) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    arena = mmap(NULL, kArena, PROT_NONE, flags, -1, 0);
    blocks = mmap(NULL, kArena / kPage * sizeof(Block), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (arena == MAP_FAILED || blocks == MAP_FAILED) die("guarded_allocator: no address space\n");
  }
  side = wanted;
}

static void* guarded(size_t alignment, size_t size, int where) {
  const size_t pages = size / kPage + 1;
  const size_t begin = atomic_fetch_add(&used, pages * kPage + kGuard) + kGuard;
  if (begin + pages * kPage + kGuard > kArena) die("guarded_allocator: the arena is full\n");
  char* first = arena + begin;
  if (mprotect(first, pages * kPage, PROT_READ | PROT_WRITE) != 0) die("guarded_allocator: mprotect failed\n");
  char* data = where == kStart ? first : first + (pages * kPage - size) / alignment * alignment;
  memset(first, kPattern, pages * kPage);
  memset(data, 0xFF, size);
  blocks[begin / kPage] = (Block){size, pages, data};
  return data;
}

static void release(char* data) {
  size_t page = (size_t)(data - arena) / kPage;
  while (blocks[page].data == NULL && page > 0) --page;
  Block* block = &blocks[page];
  if (block->data != data) die("guarded_allocator: freed twice, or not what was allocated\n");
  unsigned char *first = (unsigned char*)arena + page * kPage, *last = first + block->pages * kPage;
  for (unsigned char* byte = first; byte < (unsigned char*)data; ++byte) {
    if (*byte != kPattern) die("guarded_allocator: written before the start of an allocation\n");
  }
  for (unsigned char* byte = (unsigned char*)data + block->size; byte < last; ++byte) {
    if (*byte != kPattern) die("guarded_allocator: written past the end of an allocation\n");
  }
  madvise(first, block->pages * kPage, MADV_DONTNEED);
  if (mprotect(first, block->pages * kPage, PROT_NONE) != 0) die("guarded_allocator: mprotect failed\n");
}

int posix_memalign(void** result, size_t alignment, size_t size) {
  static int (*next)(void**, size_t, size_t);
  const int where = side;
  if (where != kOff && alignment <= kPage) {
    *result = guarded(alignment, size, where);
    return 0;
  }
  if (next == NULL) *(void**)&next = dlsym(RTLD_NEXT, "posix_memalign");
  return next == NULL ? ENOMEM : next(result, alignment, size);
}

void free(void* pointer) {
  static void (*next)(void*);
  if (arena != NULL && (char*)pointer >= arena && (char*)pointer < arena + kArena) {
    release(pointer);
    return;
  }
  if (next == NULL) *(void**)&next = dlsym(RTLD_NEXT, "free");
  if (next != NULL) next(pointer);
}
