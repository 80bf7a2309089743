#include "textflag.h"

// func prefetch(addresses []uintptr)
TEXT ·prefetch(SB), NOSPLIT, $0-24
	MOVQ addresses_base+0(FP), SI
	MOVQ addresses_len+8(FP), CX
	LEAQ (SI)(CX*8), DX

next:
	CMPQ       SI, DX
	JGE        done
	MOVQ       (SI), AX
	PREFETCHT1 (AX)
	ADDQ       $8, SI
	JMP        next

done:
	RET
