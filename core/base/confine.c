/* SPDX-License-Identifier: Apache-2.0 */
/* Landlock rules (Documentation/userspace-api/landlock.rst) and a seccomp filter, by system call:
 * the C library has functions for neither, and its constants may be older than the kernel. */
#include "base/confine.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"

/* ---- files: Landlock ---- */

/* Landlock's system calls have the same numbers on every architecture. */
enum { LANDLOCK_CREATE = 444, LANDLOCK_ADD = 445, LANDLOCK_RESTRICT = 446 };
enum { ASK_VERSION = 1, PATH_BENEATH = 1, NET_PORT = 2 };

#define FS_READ_FILE (UINT64_C(1) << 2)
#define FS_READ_DIR (UINT64_C(1) << 3)
#define NET_CONNECT (UINT64_C(1) << 1)

struct ruleset {
    uint64_t files, net, scoped;
};

struct port_rule {
    uint64_t allowed, port;
};

struct path_rule {
    uint64_t allowed;
    int32_t parent_fd;
} __attribute__((packed));

/* All rights of this version of the kernel's interface. A right that is not handled here is not
 * denied. */
static struct ruleset all_rights(unsigned version)
{
    static const unsigned char files[] = {0, 13, 14, 15, 15, 16}; /* number of rights, by version */
    const unsigned n = files[version < sizeof files ? version : sizeof files - 1];

    return (struct ruleset){
        .files = (UINT64_C(1) << n) - 1,
        .net = version >= 4 ? 3 : 0,    /* TCP: bind, connect */
        .scoped = version >= 6 ? 3 : 0, /* abstract sockets, signals */
    };
}

/* The size of the structure, which is smaller for an older kernel. */
static size_t ruleset_size(unsigned version)
{
    return version >= 6   ? sizeof(struct ruleset)
           : version >= 4 ? offsetof(struct ruleset, scoped)
                          : offsetof(struct ruleset, net);
}

int ckpt_landlock_allow(int rules, const char *path)
{
    ckpt_cleanup(ckpt_closep) int fd = open(path, O_PATH | O_CLOEXEC);
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        return 0;
    const struct path_rule rule = {
        .allowed = S_ISDIR(st.st_mode) ? FS_READ_FILE | FS_READ_DIR : FS_READ_FILE,
        .parent_fd = fd,
    };
    return (int)syscall(LANDLOCK_ADD, rules, PATH_BENEATH, &rule, 0);
}

int ckpt_landlock_port(int rules, unsigned port)
{
    const struct port_rule rule = {.allowed = NET_CONNECT, .port = port};

    return (int)syscall(LANDLOCK_ADD, rules, NET_PORT, &rule, 0);
}

unsigned ckpt_landlock_version(void)
{
    const long version = syscall(LANDLOCK_CREATE, NULL, 0, ASK_VERSION);

    return version > 0 ? (unsigned)version : 0;
}

int ckpt_landlock_begin(unsigned version, int *ret_rules, struct ckpt_err *err)
{
    const struct ruleset rights = all_rights(version);

    *ret_rules = (int)syscall(LANDLOCK_CREATE, &rights, ruleset_size(version), 0);
    if (*ret_rules < 0)
        return ckpt_fail_errno(err, errno, "making Landlock rules");
    (void)fcntl(*ret_rules, F_SETFD, FD_CLOEXEC);
    return 0;
}

int ckpt_landlock_enter(int rules, struct ckpt_err *err)
{
    return syscall(LANDLOCK_RESTRICT, rules, 0) < 0
               ? ckpt_fail_errno(err, errno, "confining the process by Landlock")
               : 0;
}

/* ---- system calls: seccomp ---- */

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#elif defined(__riscv) && __riscv_xlen == 64
#define ARCHITECTURE AUDIT_ARCH_RISCV64
#elif defined(__powerpc64__) && defined(__LITTLE_ENDIAN__)
#define ARCHITECTURE AUDIT_ARCH_PPC64LE
#endif

static const int tracing[] = {SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_kill};

/* Running programs and creating processes; clone is checked below. */
static const int processes[] = {SYS_execve,     SYS_execveat,    SYS_unshare,           SYS_setns,
                                SYS_pidfd_open, SYS_pidfd_getfd, SYS_pidfd_send_signal,
#ifdef SYS_fork
                                SYS_fork,       SYS_vfork
#endif
};

/* Opening files by handle, which bypasses directories and Landlock. */
static const int handles[] = {SYS_open_by_handle_at, SYS_name_to_handle_at};

static const int changes[] = {SYS_fchmod,   SYS_fchmodat, SYS_fchown, SYS_fchownat, SYS_utimensat,
#ifdef SYS_chmod
                              SYS_chmod,    SYS_chown,    SYS_lchown, SYS_utime,    SYS_utimes,
                              SYS_futimesat
#endif
};

static const int attributes[] = {SYS_setxattr,    SYS_lsetxattr,    SYS_fsetxattr,
                                 SYS_removexattr, SYS_lremovexattr, SYS_fremovexattr};

static const int mounts[] = {SYS_mount,        SYS_umount2,    SYS_pivot_root, SYS_chroot,
                             SYS_open_tree,    SYS_move_mount, SYS_fsopen,     SYS_fsconfig,
                             SYS_fsmount,      SYS_fspick,
#ifdef SYS_mount_setattr
                             SYS_mount_setattr
#endif
};

static const int identities[] = {SYS_setuid,    SYS_setgid,    SYS_setreuid, SYS_setregid,
                                 SYS_setresuid, SYS_setresgid, SYS_setfsuid, SYS_setfsgid,
                                 SYS_setgroups, SYS_capset};

/* Large parts of the kernel that we do not use. */
static const int unused[] = {SYS_bpf,         SYS_keyctl,      SYS_add_key,        SYS_request_key,
                             SYS_personality, SYS_userfaultfd, SYS_perf_event_open};
static const int rings[] = {SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register};

/* Settings of the system. */
static const int settings[] = {
    SYS_init_module, SYS_finit_module, SYS_delete_module, SYS_kexec_load,
    SYS_reboot,      SYS_swapon,       SYS_swapoff,       SYS_acct,
    SYS_quotactl,    SYS_settimeofday, SYS_clock_settime, SYS_clock_adjtime,
    SYS_adjtimex,    SYS_sethostname,  SYS_setdomainname, SYS_syslog};

/* The network, and local daemons; a process that makes connections needs the first ones. */
static const int network[] = {SYS_socket, SYS_connect, SYS_socketpair, SYS_bind};
static const int serving[] = {SYS_listen, SYS_accept, SYS_accept4};

#define LIST(list)                                                                                 \
    {                                                                                              \
        list, sizeof list / sizeof *list                                                           \
    }
struct calls {
    const int *call;
    size_t n;
};

static const struct calls refused[] = {
    LIST(processes),  LIST(handles), LIST(changes), LIST(attributes), LIST(mounts),
    LIST(identities), LIST(unused),  LIST(rings),   LIST(settings),   LIST(serving)};

enum { MOST_CODE = 512 };

struct filter {
    struct sock_filter code[MOST_CODE];
    unsigned short len;
};

static void put(struct filter *f, struct sock_filter op)
{
    assert(f->len < MOST_CODE);
    f->code[f->len++] = op;
}

static void load(struct filter *f, size_t offset)
{
    put(f, (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset));
}

static void end(struct filter *f, uint32_t action)
{
    put(f, (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action));
}

/* Execute the next instruction only if the loaded word has this value. */
static void when(struct filter *f, uint32_t value)
{
    put(f, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1));
}

static void refuse(struct filter *f, const struct calls *calls)
{
    for (size_t i = 0; i < calls->n; i++) {
        when(f, (uint32_t)calls->call[i]);
        end(f, SECCOMP_RET_ERRNO | EPERM);
    }
}

/* Allow new threads but no new processes. The flags of clone3 are in memory, which a filter cannot
 * read, so clone3 fails with ENOSYS and the C library falls back to clone. */
static void allow_threads_only(struct filter *f)
{
    when(f, SYS_clone3);
    end(f, SECCOMP_RET_ERRNO | ENOSYS);
    put(f, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 4));
    load(f, offsetof(struct seccomp_data, args));
    put(f, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 0, 1));
    end(f, SECCOMP_RET_ALLOW);
    end(f, SECCOMP_RET_ERRNO | EPERM);
}

bool ckpt_seccomp_enter(bool connects)
{
#ifdef ARCHITECTURE
    struct filter f = {.len = 0};

    load(&f, offsetof(struct seccomp_data, arch));
    put(&f, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0));
    end(&f, SECCOMP_RET_KILL_PROCESS);
    load(&f, offsetof(struct seccomp_data, nr));
#ifdef __x86_64__
    /* system calls of the x32 ABI begin here */
    put(&f, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1));
    end(&f, SECCOMP_RET_ERRNO | ENOSYS);
#endif
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        refuse(&f, &refused[i]);
    if (!connects)
        refuse(&f, &(struct calls)LIST(network));
    if (!CKPT_LEAKS_ARE_LOOKED_FOR) {
        refuse(&f, &(struct calls)LIST(tracing));
        allow_threads_only(&f);
    }
    end(&f, SECCOMP_RET_ALLOW);
    const struct sock_fprog program = {.len = f.len, .filter = f.code};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
#else
    return false;
#endif
}
